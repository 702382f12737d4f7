"""Tokenizers for models that we build: words and things of a closed domain as one token each, or plain bytes.

A piece of text keeps the space before it (" fridge 1"), as in GPT-2's vocabulary, so that the text of a sequence of
tokens is the texts of its tokens one after another: nothing is lost in a text whose pieces are all in the vocabulary,
and what a token says does not depend on its neighbours, which constrained decoding counts on. A tokenizer may also be
made to lose what a small model has no use for, articles, signs and spaces: then contexts are a third as long.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal, get_args

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from reward_kit.credit.options import check_choice
from reward_kit.errors import ConfigError, boundary
from reward_kit.rl.model_kit.templates import CALL_MARKS, CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS, UNKNOWN

Level = Literal["word", "byte"]
Spaces = Literal["kept", "single", "none"]


def build_tokenizer(
    texts: Iterable[str] = (),
    *,
    words: Iterable[str] = (),
    units: Sequence[str] = (),
    level: Level = "word",
    spaces: Spaces = "kept",
    dropped: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    context: int | None = None,
) -> PreTrainedTokenizerFast:
    r"""A tokenizer with our chat template inside; `save_pretrained` and `AutoTokenizer.from_pretrained` keep it whole.

    Word by word ("word"), a text is taken apart into units, words (`\w+`) and single signs, each with the one space
    that may stand before it; every further character of white space is a piece of its own. The vocabulary is what
    occurs in `texts` and `words`, every piece with a space before it and without, spaces and line breaks. All else
    becomes `<|unknown|>`; `unknown_pieces` counts it. What is lost: unknown pieces, what is `dropped`, and spaces where
    they are not kept.

    Byte by byte ("byte"), a token is a byte of UTF-8: nothing is unknown, and there is no vocabulary to build.

    Args:
        texts: of the domain, for its vocabulary.
        words: words and things that may come up and are not in the texts.
        units: regular expressions (Oniguruma's) of what is to be one token though it is several words; the first that
            matches counts. `[a-z]+ \d+` makes "fridge 1" one token, `\{"name": "` the beginning of a call.
        level: "word" or "byte".
        spaces: "kept"; "single" makes every run of white space one space, and none at the ends of a text; with "none"
            white space only parts pieces, so that a word has one form, and one space stands between the texts of
            tokens. No grammar can be compiled for such a tokenizer; choices among listed texts can be.
        dropped: regular expressions (Oniguruma's) of what is left out of every text, one after another, before anything
            else, such as `(?i)\b(?:a|the)\b`. Whoever reads tokens does not see it: what observations lose is lost to
            the model, and two choices that differ in nothing else cannot be told apart.
        chat_template: Jinja, with the marks of `templates`.
        context: what `model_max_length` says.

    Raises:
        ConfigError: the level is unknown, there is no vocabulary or one that is not wanted, or a unit or something
            dropped is no expression.
    """
    check_choice("level", level, get_args(Level))
    check_choice("spaces", spaces, get_args(Spaces))
    if level == "word":
        core = _word_level(texts, words, units, spaces, dropped)
    elif units or list(words) or list(texts) or spaces == "none":
        raise ConfigError(
            "a tokenizer of bytes has no vocabulary to build; leave out texts, words, units and spaces='none'"
        )
    else:
        core = _byte_level(spaces, dropped)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in CALL_MARKS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN if level == "word" else None,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, END, UNKNOWN)],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        **({"model_max_length": context} if context is not None else {}),
    )


def _word_level(
    texts: Iterable[str], words: Iterable[str], units: Sequence[str], spaces: Spaces, dropped: Sequence[str]
) -> Tokenizer:
    _check_expressions("units", units)
    alternatives = "|".join([*(f"(?:{unit})" for unit in units), r"\w+", r"[^\w\s]"])
    core = Tokenizer(models.WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN))
    if spaces == "none":
        # Without a decoder a space is put between the texts of tokens.
        core.pre_tokenizer = pre_tokenizers.Split(Regex(alternatives), behavior="removed", invert=True)
    else:
        core.pre_tokenizer = pre_tokenizers.Split(Regex(f" ?(?:{alternatives})|\\s"), behavior="isolated")
        core.decoder = decoders.Fuse()
    core.normalizer = _normalizer(spaces, dropped)
    pieces = _pieces(core, chain(texts, words))
    if not pieces:
        raise ConfigError("a tokenizer of words needs texts or words for its vocabulary; for plain bytes level='byte'")
    if spaces != "none":
        _add_other_forms(pieces)
    ordered = sorted(pieces, key=lambda piece: (-pieces[piece], piece))
    vocabulary = dict.fromkeys([*SPECIAL_TOKENS, *CALL_MARKS, *ordered])
    core.model = models.WordLevel({piece: place for place, piece in enumerate(vocabulary)}, unk_token=UNKNOWN)
    return core


def _check_expressions(name: str, expressions: Sequence[str]) -> None:
    for expression in expressions:
        with boundary(ConfigError, f"{name}: {expression!r} is no regular expression"):
            Regex(expression)


def _normalizer(spaces: Spaces, dropped: Sequence[str]) -> normalizers.Normalizer | None:
    _check_expressions("dropped", dropped)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(Regex(expression), "") for expression in dropped]
    if spaces == "single":
        steps += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    return normalizers.Sequence(steps) if steps else None


def _pieces(core: Tokenizer, texts: Iterable[str]) -> Counter[str]:
    """How often each piece occurs."""
    found: Counter[str] = Counter()
    for text in texts:
        plain = core.normalizer.normalize_str(text) if core.normalizer is not None else text
        found.update(piece for piece, _ in core.pre_tokenizer.pre_tokenize_str(plain))
    return found


def _add_other_forms(pieces: Counter[str]) -> None:
    """Every piece's other form, with a space or without, and white space itself, as occurring 0 times."""
    words = [piece for piece in pieces if not piece.isspace()]
    others = [piece[1:] if piece.startswith(" ") else f" {piece}" for piece in words]
    for piece in (*others, " ", "\n") if words else ():
        pieces.setdefault(piece, 0)


def _byte_level(spaces: Spaces, dropped: Sequence[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate([*SPECIAL_TOKENS, *CALL_MARKS, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.normalizer = _normalizer(spaces, dropped)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return core


def unknown_pieces(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Counter[str]:
    """What of these texts is not in the vocabulary, and how often; empty where nothing is lost.

    Args:
        tokenizer: one with offsets, as all that are built here are.
        texts: without the marks of the chat template.
    """
    found: Counter[str] = Counter()
    if tokenizer.unk_token_id is None:
        return found
    for text in texts:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if token == tokenizer.unk_token_id:
                found[text[start:stop]] += 1
    return found


def tool_texts(tools: Iterable[dict[str, Any]]) -> list[str]:
    """The texts that tools become in our chat template, for the vocabulary of a tokenizer."""
    return [json.dumps(tool, ensure_ascii=False) for tool in tools]
