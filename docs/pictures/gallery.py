"""Makes `gallery/NAME.png`, small copies of what the examples drew into examples/output.

`python docs/pictures/gallery.py [NAME ...]`; it needs Pillow, which matplotlib brings. An example
that has not run keeps its old picture.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

HERE = Path(__file__).resolve().parent
DRAWN = HERE.parents[1] / 'examples' / 'output'
WIDTH, COLOURS = 800, 48


def main(names: list[str]) -> list[Path]:
    made = []
    for path in sorted(DRAWN.glob('*.png')):
        if names and path.stem not in names:
            continue
        with Image.open(path) as picture:
            size = WIDTH, round(picture.height * WIDTH / picture.width)
            small = picture.convert('RGB').resize(size, Image.Resampling.LANCZOS)
            made.append(HERE / 'gallery' / path.name)
            small.quantize(COLOURS).save(made[-1], optimize=True)
    return made


if __name__ == '__main__':
    print(*main(sys.argv[1:]), sep='\n')
