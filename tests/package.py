"""``python -m tests.package [VERSION...]``: both distributions are built, looked at as an index
does, and installed on these Pythons, as 3.12, or on the one that runs this; there README's blocks
have to print what README shows.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST, PLACE = ROOT / 'dist', ROOT / 'build' / 'package'
OWN = '.'.join(map(str, sys.version_info[:2]))
BLOCK = re.compile(r'^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?', re.DOTALL | re.MULTILINE)


def run(*command: object) -> str:
    """What a command prints; it ends this program where it fails."""
    inside = os.environ | {'JAX_PLATFORMS': 'cpu'}
    inside.pop('PYTHONPATH', None)
    words = list(map(str, command))
    done = subprocess.run(words, cwd=PLACE, env=inside, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f'{" ".join(words)}\n{done.stdout}{done.stderr}')
    return done.stdout


def build() -> tuple[Path, Path]:
    """The wheels of the package and of its verifier."""
    for folder in (DIST, PLACE):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for project in (ROOT, ROOT / 'receipts'):
        run(sys.executable, '-m', 'build', '--outdir', DIST, project)
    run(sys.executable, '-m', 'twine', 'check', '--strict', *DIST.iterdir())
    for file in sorted(DIST.iterdir()):
        print(f'{file.name}  {file.stat().st_size / 1e6:.2f} MB')
    (package,), (verifier,) = (DIST.glob(f'braintrace_{n}-*.whl') for n in ('online', 'receipts'))
    return package, verifier


def interpreter(version: str) -> str | None:
    """A Python of this version: this one, or on the PATH, where a name may be a shim that does not
    run, or of pyenv.
    """
    if version == OWN:
        return sys.executable
    pyenv = Path(os.environ.get('PYENV_ROOT', Path.home() / '.pyenv')) / 'versions'
    for found in (f'python{version}', *sorted(pyenv.glob(f'{version}.*/bin/python'))):
        with contextlib.suppress(OSError):
            if not subprocess.run([found, '--version'], capture_output=True).returncode:
                return str(found)
    return None


def install(python: str, version: str, package: Path, verifier: Path) -> None:
    """The wheels alone give the package and the command; with the extras README's blocks run."""
    run(python, '-m', 'venv', PLACE / version)
    folder = PLACE / version / 'bin'
    pip = (folder / 'python', '-m', 'pip')
    run(*pip, 'install', '-q', verifier)
    run(folder / 'braintrace-receipts', 'rules')
    run(*pip, 'install', '-q', package)
    run(folder / 'python', '-W', 'error', '-c', 'import braintrace, braintrace.nn')
    run(*pip, 'install', '-q', f'{package}[adapters,examples,receipts]')
    run(*pip, 'check')
    print(version, run(folder / 'python', '-P', __file__, ROOT / 'README.md').rstrip(), flush=True)


def read_me(page: Path) -> None:
    """Run the blocks of Python of a page; each prints what is behind it."""
    names: dict = {}
    blocks = BLOCK.findall(page.read_text(encoding='utf-8'))
    for code, shown in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, page.name, 'exec'), names)
        if printed.getvalue() != shown:
            sys.exit(f'{code}printed\n{printed.getvalue()}instead of\n{shown}')
    versions = {each: names[each].__version__ for each in ('jax', 'brainstate', 'braintrace')}
    print(f'{len(blocks)} blocks of {page.name}, with {versions}')
    assert 'site-packages' in names['braintrace'].__file__, names['braintrace'].__file__


def main(versions: list[str]) -> None:
    wheels = build()
    found = {version: interpreter(version) for version in versions}
    for version, python in found.items():
        if python is None:
            print(f'{version} left out: there is no such Python')
        else:
            install(python, version, *wheels)
    if not any(found.values()):
        sys.exit(f'none of Python {", ".join(versions)} is there')


if __name__ == '__main__':
    page = ROOT / 'README.md'
    read_me(page) if sys.argv[1:] == [str(page)] else main(sys.argv[1:] or [OWN])
