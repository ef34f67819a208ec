"""Expected answers from outside: tiny models of every family, and what transformers says of them."""
