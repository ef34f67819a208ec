"""The window and the rotary embedding of each layer, as tests state them."""

from __future__ import annotations


def ropes(config):
    return [(kind.window, kind.rope_theta, kind.rope_scaling) for kind in config.layers]
