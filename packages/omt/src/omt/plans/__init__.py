"""From a table between components to a plan between samples, coarse or resolved to cells."""
