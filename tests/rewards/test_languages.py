"""Test the language of a reply: texts in thirty-two languages, compared pairwise, and ignored text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit import with_options
from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import Message
from reward_kit.rewards.languages import known_languages, same_language
from tests.rewards.forms import ask, histories, long, said, texts, turns

TEXTS = {
    "en": "To find the area, we multiply the length by the width. The answer is twelve.",
    "de": "Um die Fläche zu finden, multiplizieren wir die Länge mit der Breite. Die Antwort ist zwölf.",
    "fr": "Pour trouver l'aire, nous multiplions la longueur par la largeur. La réponse est douze.",
    "es": "Para hallar el área multiplicamos el largo por el ancho. La respuesta es doce.",
    "it": "Per trovare l'area moltiplichiamo la lunghezza per la larghezza. La risposta è dodici.",
    "pt": "Para achar a área, multiplicamos o comprimento pela largura. A resposta é doze.",
    "nl": "Om de oppervlakte te vinden vermenigvuldigen we de lengte met de breedte. Het antwoord is twaalf.",
    "sv": "För att hitta arean multiplicerar vi längden med bredden. Svaret är tolv.",
    "da": "For at finde arealet ganger vi længden med bredden. Svaret er tolv.",
    "pl": "Aby znaleźć pole, mnożymy długość przez szerokość. Odpowiedź to dwanaście.",
    "cs": "Abychom našli obsah, vynásobíme délku a šířku. Odpověď je dvanáct.",
    "ro": "Pentru a găsi aria, înmulțim lungimea cu lățimea. Răspunsul este doisprezece.",
    "hu": "A terület kiszámításához a hosszúságot megszorozzuk a szélességgel. A válasz tizenkettő.",
    "fi": "Pinta-ala saadaan, kun pituus kerrotaan leveydellä. Vastaus on kaksitoista.",
    "tr": "Alanı bulmak için uzunluğu genişlikle çarparız. Bu sorunun cevabı on ikidir.",
    "id": "Untuk mencari luas, kita mengalikan panjang dengan lebar. Jawabannya adalah dua belas.",
    "vi": "Để tìm diện tích, ta nhân chiều dài với chiều rộng. Đáp án là mười hai.",
    "ru": "Чтобы найти площадь, мы умножаем длину на ширину. Ответ — двенадцать.",
    "uk": "Щоб знайти площу, ми множимо довжину на ширину. Відповідь — дванадцять.",
    "bg": "За да намерим лицето, умножаваме дължината по ширината. Отговорът е дванадесет.",
    "ar": "لإيجاد المساحة نضرب الطول في العرض. الجواب هو اثنا عشر من الأمتار المربعة.",
    "fa": "برای یافتن مساحت، طول را در عرض ضرب می‌کنیم. پاسخ این سؤال دوازده است.",
    "ur": "رقبہ معلوم کرنے کے لیے ہم لمبائی کو چوڑائی سے ضرب دیتے ہیں۔ جواب بارہ ہے۔",
    "hi": "क्षेत्रफल निकालने के लिए हम लंबाई को चौड़ाई से गुणा करते हैं। उत्तर बारह है।",
    "mr": "क्षेत्रफळ काढण्यासाठी आपण लांबी आणि रुंदी यांचा गुणाकार करतो. उत्तर बारा आहे.",
    "zh": "为了求面积，我们把长度乘以宽度。答案是十二。",
    "ja": "面積を求めるには、長さに幅を掛けます。答えは十二です。",
    "ko": "넓이를 구하려면 길이에 너비를 곱합니다. 답은 십이입니다.",
    "el": "Για να βρούμε το εμβαδόν πολλαπλασιάζουμε το μήκος με το πλάτος. Η απάντηση είναι δώδεκα.",
    "he": "כדי למצוא את השטח נכפיל את האורך ברוחב. התשובה היא שתים עשרה.",
    "th": "ในการหาพื้นที่ เราคูณความยาวด้วยความกว้าง คำตอบคือสิบสอง",
    "ta": "பரப்பளவைக் கண்டறிய நீளத்தை அகலத்தால் பெருக்குகிறோம். விடை பன்னிரண்டு.",
}
SECOND = {
    "en": "Yes, you can do that. But first you have to ask them.",
    "de": "Ja, das kannst du machen. Aber zuerst musst du sie fragen.",
    "fr": "Oui, tu peux le faire. Mais il faut d'abord leur demander.",
    "es": "Sí, puedes hacerlo. Pero primero tienes que preguntarles a ellos.",
    "it": "Sì, puoi farlo. Ma prima devi chiedere a loro che cosa ne pensano.",
    "pt": "Sim, você pode fazer isso. Mas primeiro tem de perguntar a eles.",
    "nl": "Ja, dat kun je doen. Maar eerst moet je het hun vragen.",
    "sv": "Ja, det kan du göra. Men först måste du fråga dem om det är bra.",
    "pl": "Tak, możesz to zrobić. Ale najpierw musisz ich o to zapytać.",
    "tr": "Evet, bunu yapabilirsin. Ama önce onlara sormak gerekir, çünkü bu çok önemli.",
    "ru": "Да, ты можешь это сделать. Но сначала надо их спросить.",
    "uk": "Так, ти можеш це зробити. Але спочатку треба їх спитати.",
    "zh": "可以，你能这样做。不过你得先问问他们的意见。",
    "ja": "はい、できます。でも、まず彼らに聞いてください。",
    "ko": "네, 그렇게 해도 됩니다. 하지만 먼저 그들에게 물어보세요.",
    "ar": "نعم، يمكنك أن تفعل ذلك. لكن عليك أن تسألهم قبل كل شيء.",
    "hi": "हाँ, आप यह कर सकते हैं। लेकिन पहले आप को उन से पूछना होगा।",
    "el": "Ναι, μπορείς να το κάνεις. Αλλά πρώτα πρέπει να τους ρωτήσεις.",
    "he": "כן, אתה יכול לעשות את זה. אבל קודם צריך לשאול אותם.",
    "th": "ได้ คุณทำได้ แต่ต้องถามพวกเขาก่อน",
}


@pytest.mark.parametrize("language", TEXTS)
def test_text_matches_only_its_own_language(language):
    mine = with_options(same_language, language=language)
    for other, text in [*TEXTS.items(), *SECOND.items()]:
        score = ask(mine, text).score
        assert score == 1 if other == language else score < 0.5, (other, text, score)


@pytest.mark.parametrize("language", TEXTS)
def test_language_defaults_to_the_language_of_the_prompt(language):
    for other, text in [*TEXTS.items(), *SECOND.items()]:
        score = same_language(said(text, prompt=TEXTS[language])).score
        assert score == 1 if other == language else score < 0.5, (other, text, score)


EN, DE, ZH = TEXTS["en"], TEXTS["de"], TEXTS["zh"]
CASES: dict[str, tuple[str | None, dict, float]] = {
    "empty": ("", {"language": "en"}, 0.0),
    "no text": (None, {"language": "en"}, 0.0),
    "blank": (" \n", {"language": "en"}, 0.0),
    "a number": ("42", {"language": "en"}, 1.0),
    "a formula": ("$x = 3$", {"language": "zh"}, 1.0),
    "a letter of choice": ("B", {"language": "de"}, 1.0),
    "a name": ("Paris", {"language": "de"}, 1.0),
    "a name of another script": ("Париж", {"language": "de"}, 0.0),
    "region": (DE, {"language": "de-AT"}, 1.0),
    "script": (ZH, {"language": "zh_Hant"}, 1.0),
    "capitals": (DE.upper(), {"language": "DE"}, 1.0),
    "half and half, by words": ("Das ist nicht gut.\nThis is not good.", {"language": "de"}, 0.5),
    "one sentence of three": (
        "Das ist nicht gut.\nThis is not good.\nIt is what it was.",
        {"language": "en"},
        9 / 13,
    ),
    "r1: mixed scripts in a sentence": ("我们 think 因此", {"language": "zh"}, 4 / 5),
    "r1: thought in another language": (f"<think>{ZH}</think>{EN}", {"language": "en", "of": "answer"}, 1.0),
    "r1: only the thought": (f"<think>{ZH}</think>{EN}", {"language": "zh", "of": "thought"}, 1.0),
    "enough": ("我们 think 因此", {"language": "zh", "enough": 0.8}, 1.0),
    "not enough": ("我们 think 因此", {"language": "zh", "enough": 1.0}, 0.8),
    "scaled to enough": ("我们 think it 因此", {"language": "zh", "enough": 0.8}, 4 / 6 / 0.8),
    "fenced code": (f"{DE}\n```python\nfor the_name in that: print('this is it')\n```", {"language": "de"}, 1.0),
    "inline code": (f"{ZH} `this is not that`", {"language": "zh"}, 1.0),
    "display formula": (f"{ZH} $$\\text{{this is it}}$$", {"language": "zh"}, 1.0),
    "latex brackets": (f"{ZH} \\[\\text{{this}} = it\\] \\(and that\\)", {"language": "zh"}, 1.0),
    "latex environment": (f"{ZH} \\begin{{align}} this is it \\end{{align}}", {"language": "zh"}, 1.0),
    "latex command": (f"{ZH} \\boxed{{12}}", {"language": "zh"}, 1.0),
    "sums of money are no formula": ("it costs $5 and they are $6", {"language": "zh"}, 0.0),
    "link": (f"{ZH} https://example.org/this/is/it?and=that", {"language": "zh"}, 1.0),
    "link without blanks": ("请看https://example.org/的说明", {"language": "zh"}, 1.0),
    "mail": (f"{ZH} some.one@example.org", {"language": "zh"}, 1.0),
    "tags": (f"<think>{ZH}</think><answer>{ZH}</answer>", {"language": "zh"}, 1.0),
    "names with an underscore": (f"{ZH} file_name the_thing", {"language": "zh"}, 1.0),
    "full-width letters": ("Ｔｈｉｓ ｉｓ ｎｏｔ ｇｏｏｄ", {"language": "en"}, 1.0),
    "letters of mathematics": ("𝐓𝐡𝐢𝐬 𝐢𝐬 𝐧𝐨𝐭 𝐠𝐨𝐨𝐝", {"language": "en"}, 1.0),
    "kanji alone pass for japanese when few": ("東京", {"language": "ja"}, 1.0),
    "katakana": ("コンピューター", {"language": "ja"}, 1.0),
    "kana are not chinese": ("これはペンです", {"language": "zh"}, 0.0),
    "hangul and kana": ("안녕 これ", {"language": "ko"}, 1 / 3),
    "persian with its half blanks": (TEXTS["fa"].replace("\u200c", ""), {"language": "fa"}, 1.0),
    "combining accents": ("Ou\u0300 est-il alle\u0301 et que fait-il", {"language": "fr"}, 1.0),
    "a language that is not known, in many words": (
        "Gizon bat ikusi nuen kalean zakur beltz handi batekin paseatzen atzo arratsaldean berandu samar ibili",
        {"language": "en"},
        0.0,
    ),
    "a list of names has no small words": (
        "Anna, Bert, Carl, Dora, Emil, Fritz, Gerd, Hans, Ida, Jan, Karl, Lea, Max",
        {"language": "en"},
        1.0,
    ),
    "trap: keyboard noise": ("qwe rty uio pas dfg hjk zxc vbn mqw ert yui opa sdf", {"language": "en"}, 0.0),
    "trap: short sentences in another language": ("Ja. Das. Ist. Nicht. Gut.", {"language": "en"}, 0.0),
}


@pytest.mark.parametrize(("reply", "options", "score"), CASES.values(), ids=CASES)
def test_only_words_are_counted(reply, options, score):
    assert ask(same_language, reply, **options).score == pytest.approx(score)


def test_short_prompt_requires_its_script():
    assert same_language(said(DE, prompt="Paris?")).score == 1.0
    assert same_language(said(ZH, prompt="Paris?")).score == 0.0
    assert same_language(said(ZH, prompt="东京?")).score == 1.0


@pytest.mark.parametrize("prompt", ["", "2 + 2 = ?", "$x$", "ᚠᚢᚦ"])
def test_a_prompt_without_words_leaves_the_rollout_unscored(prompt):
    with pytest.raises(RewardError, match="prompt"):
        same_language(said(EN, prompt=prompt))


def test_prompt_is_the_last_message_before_the_reply():
    assert same_language([*said(EN, prompt=EN), *said(DE, prompt=DE)]).score == 1.0
    assert same_language([*said(EN, prompt=EN), *said(EN, prompt=DE)]).score == 0.0
    later = Message(role="user", content=ZH)
    assert same_language([*said(DE, prompt=DE), later]).score == 1.0


def test_undetermined_language_is_correct_or_unscored():
    assert ask(same_language, "Paris", language="de").score == 1.0
    with pytest.raises(RewardError, match="is uncertain"):
        ask(same_language, "Paris", language="de", unknown="unscored")


def test_the_reason_names_the_languages():
    assert "others are in en" in ask(same_language, f"{DE} {EN}", language="de").reason
    assert "others are in ru" not in ask(same_language, "Париж", language="de").reason
    assert "Cyrillic script" in ask(same_language, "Париж", language="de").reason


@pytest.mark.parametrize("language", ["xx", "", "german", "e"])
def test_unknown_language_is_rejected(language):
    with pytest.raises(ConfigError, match="known: af, am"):
        ask(same_language, "x", language=language)


languages = st.sampled_from(sorted(known_languages()))


@given(histories, turns, languages, st.floats(0.1, 1))
def test_same_language_scores_any_history(history, own, language, enough):
    assert 0 <= same_language(history, own, language=language, enough=enough).score <= 1


@given(histories, turns)
def test_any_history_is_compared_with_its_prompt_or_unscored(history, own):
    try:
        score = same_language(history, own).score
    except RewardError:
        return
    assert 0 <= score <= 1


@given(st.sampled_from(sorted(TEXTS)), st.integers(1, 3), texts.filter(lambda text: text.isascii() and "`" not in text))
def test_repetition_and_code_do_not_change_the_score(language, times, code):
    text = TEXTS[language]
    assert ask(same_language, f"{text}\n" * times + f"```\n{code}\n```", language=language).score == 1.0


@given(st.lists(st.sampled_from(sorted(TEXTS)), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_sentences_does_not_matter(chosen, chance):
    mixed = [TEXTS[language] for language in chosen]
    shuffled = chance.sample(mixed, len(mixed))
    one, other = (ask(same_language, "\n".join(order), language=chosen[0]).score for order in (mixed, shuffled))
    assert one == pytest.approx(other)
    assert 0 < one <= 1


@given(texts, languages, st.floats(0.1, 1))
def test_enough_option_scales_the_score(text, language, enough):
    strict, lenient = (ask(same_language, text, language=language, enough=bar).score for bar in (1.0, enough))
    assert lenient == pytest.approx(min(1, strict / enough))


@pytest.mark.parametrize("piece", ["the cat is ", "漢", "$a$ ", "\\begin{", "<a", "\u0315\u0300", "`", "a@"])
def test_a_megabyte_is_read_in_linear_time(piece):
    assert 0 <= ask(same_language, long(piece), language="en").score <= 1
