"""What transformers renders for the conversations of `data/chat.json`.

    python -m tests.text.regenerate_chat TEMPLATE_FOLDER [--check]

writes the texts, or the refusals, of every `*.jinja` in the folder beside the conversations; `--check`
compares instead and exits with 1 at a difference. Needs the oracle extra.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

CHAT_DATA = Path(__file__).parent / "data" / "chat.json"


def render_all(conversations: dict[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """By template and conversation: the text, or the template's refusal under `refuses`."""
    return {
        path.stem: {
            name: _render(path.read_text(encoding="utf-8"), conversation)
            for name, conversation in conversations.items()
        }
        for path in sorted(folder.glob("*.jinja"))
    }


def _render(template: str, conversation: dict[str, Any]) -> str | dict[str, str]:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {key: value for key, value in conversation.items() if key != "messages"}
    try:
        rendered, _ = render_jinja_template([conversation["messages"]], chat_template=template, **variables)
    except TemplateError as error:
        return {"refuses": str(error)}
    return rendered[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="chat templates, *.jinja")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    arguments = parser.parse_args()
    stored = json.loads(CHAT_DATA.read_text(encoding="utf-8"))
    rendered = render_all(stored["conversations"], arguments.folder)
    if arguments.check:
        sys.exit(rendered != stored["rendered"])
    stored["rendered"] = rendered
    CHAT_DATA.write_text(json.dumps(stored, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
