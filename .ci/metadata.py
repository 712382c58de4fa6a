"""What an index shows of the package: the addresses, and README with absolute links."""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Metadata(MetadataHookInterface):
    """Fills what follows from the address of the repository: `repository` of
    `[tool.hatch.metadata.hooks.custom]` in pyproject.toml, or the environment variable
    ``REPOSITORY``, which the workflows set.
    """

    def update(self, metadata: dict) -> None:
        address = os.environ.get('REPOSITORY') or self.config['repository']
        metadata['urls'] = {
            'Source': address,
            'Issues': f'{address}/issues',
            'Documentation': f'{address}/blob/main/docs/index.md',
            'Changelog': f'{address}/blob/main/CHANGELOG.md',
        }
        text = (Path(self.root) / 'README.md').read_text(encoding='utf-8')
        text = text.replace(self.config['repository'], address)
        text = re.sub(r'(src=")(?!https?:)', rf'\g<1>{address}/raw/main/', text)
        text = re.sub(r'(\]\()(?!https?:|#)', rf'\g<1>{address}/blob/main/', text)
        metadata['readme'] = {'content-type': 'text/markdown', 'text': text}
