"""The process that tries out grammars: `python -m jaxserve.structured.checker_process`.

Reads a line of JSON with the vocabulary, each token's bytes as Latin-1, and answers with an empty line when
it is ready; then for each line `[kind, text]` it answers `[lark, null]` or `[null, what is wrong]`. It bounds
itself: past its processor time or memory the system ends it, wherever in native code it is. Ends with its
input.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from typing import TYPE_CHECKING

from jaxserve.plan import Grammar
from jaxserve.structured.lark import to_lark
from jaxserve.structured.parser import build_parser, check_parser
from jaxserve.structured.vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_SECONDS = 1.0
"""Of processor time for one grammar; a usual one takes 1 to 60 ms."""
MAX_BYTES = 64 * 2**20
"""Of memory beyond what the vocabulary takes."""
MAX_FIRST_MASK_SECONDS = 0.05
"""A mask is wanted at each token; a usual one takes 20 microseconds."""


def main() -> None:
    tokens = tuple(token.encode("latin-1") for token in json.loads(sys.stdin.readline()))
    tokenizer = GrammarVocabulary(tokens).to_llguidance()
    _bound_memory()
    print(flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # whose signal nothing handles: it ends the process
        answer = _try_grammar(tokenizer, Grammar(*json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(answer), flush=True)


def _try_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> tuple[str | None, str | None]:
    """The Lark source of a grammar that can be compiled and used in bounds, or what is wrong with it."""
    try:
        lark = to_lark(grammar)
        parser = build_parser(tokenizer, lark)
        started = time.process_time()
        parser.compute_bitmask()
        check_parser(parser)
        seconds = time.process_time() - started
    except ValueError as error:
        return None, str(error)
    except MemoryError:
        return None, f"it takes over {MAX_BYTES >> 20} MiB to compile"
    if seconds > MAX_FIRST_MASK_SECONDS:
        limit = f"{1e3 * MAX_FIRST_MASK_SECONDS:.0f}"
        return None, f"it is too complex: a mask takes {1e3 * seconds:.0f} ms; the limit is {limit}"
    return lark, None


def _bound_memory() -> None:
    """Let allocations fail, which ends the process, beyond the limit. Only where Linux tells the size now."""
    try:
        with open("/proc/self/statm") as statm:
            size = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
