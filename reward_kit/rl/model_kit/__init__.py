"""Small models without a hub: tokenizers, decoders, supervised training; the public names are in `reward_kit.rl`."""
