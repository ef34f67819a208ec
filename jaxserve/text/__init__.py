"""Text in and out: tokenizers, chat templates, detokenization, stop strings."""
