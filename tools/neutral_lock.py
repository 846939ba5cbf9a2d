"""Write a uv.lock in its registry-neutral form: versions and markers stay; addresses, files and hashes go.

Git runs this as the clean filter of ``uv.lock`` (see ``.gitattributes``), so that teams behind a mirror and teams on
the public index share one lock. It reads standard input and writes standard output.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator

_REGISTRY = re.compile(r'registry = "[^"]*"')


def neutral(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a lock file without anything that depends on the index it was resolved against."""
    in_wheels = in_dropped_table = False
    pending_blank = False
    markers: list[str] | None = None
    for line in lines:
        if markers is not None:  # uv orders the forks of a resolution by how it came to them: sort them
            if line.strip() != "]":
                markers.append(line)
                continue
            yield from sorted(markers)
            markers = None
        if in_wheels:
            in_wheels = line.strip() != "]"
            continue
        if line.startswith("["):
            in_dropped_table = line.startswith(("[package.metadata", "[options"))
        if in_dropped_table or line.startswith("sdist = "):
            continue
        if line.startswith("wheels = ["):
            in_wheels = not line.rstrip().endswith("]")
            continue
        if not line.strip():
            pending_blank = True
            continue
        if pending_blank:
            yield "\n"
            pending_blank = False
        if line.startswith("resolution-markers = [") and not line.rstrip().endswith("]"):
            markers = []
        yield _REGISTRY.sub('registry = "index"', line)


if __name__ == "__main__":
    sys.stdin.reconfigure(encoding="utf-8", newline="")  # type: ignore[union-attr]
    sys.stdout.reconfigure(encoding="utf-8", newline="")  # type: ignore[union-attr]
    sys.stdout.writelines(neutral(sys.stdin))
