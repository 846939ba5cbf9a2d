"""The `omt` command: verbs, one a file. What they need is imported inside them, so that `--help` is quick."""

# Importing a verb registers it; --help lists them in this order, that of a session at work.
from omt.cli import fit  # noqa: F401, I001
from omt.cli import transport  # noqa: F401
from omt.cli import transitions  # noqa: F401
from omt.cli import bootstrap  # noqa: F401
from omt.cli import push  # noqa: F401
from omt.cli import map  # noqa: F401
from omt.cli import interpolate  # noqa: F401
from omt.cli import evaluate  # noqa: F401
from omt.cli import demo  # noqa: F401
from omt.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line."""
    app()
