"""What happens inside one pair of components: its cost, its map, and the tables of both over all pairs."""
