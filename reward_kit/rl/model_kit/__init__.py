"""Small models that require no model hub: tokenizers, decoders and supervised training.

The public names are in `reward_kit.rl`.
"""
