"""Answers that must be texts of a grammar: which tokens may come next, through the `llguidance` package.

Importing this is cheap; `llguidance` is imported when the first `GrammarCompiler` is made. No jax.
"""

from jaxserve.structured.checker import CheckLostError
from jaxserve.structured.compiler import CompiledGrammar, GrammarCompiler
from jaxserve.structured.matcher import GrammarMatcher

__all__ = ["CheckLostError", "CompiledGrammar", "GrammarCompiler", "GrammarMatcher"]
