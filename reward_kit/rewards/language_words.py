"""What tells languages apart that share a script: their small words, and letters that the others do not have.

The lists are short on purpose: words that hardly any sentence does without. A word may stand in several.
"""

from __future__ import annotations

from typing import Final

SCRIPTS: Final[dict[str, frozenset[str]]] = {
    "zh": frozenset({"CJK"}),
    "ja": frozenset({"CJK", "HIRAGANA", "KATAKANA"}),
    "ko": frozenset({"HANGUL"}),
    **dict.fromkeys(("bg", "ru", "uk"), frozenset({"CYRILLIC"})),
    **dict.fromkeys(("ar", "fa", "ur"), frozenset({"ARABIC"})),
    **dict.fromkeys(("hi", "mr"), frozenset({"DEVANAGARI"})),
    **dict.fromkeys(
        ("cs", "da", "de", "en", "es", "fi", "fr", "hu", "id", "it", "nl", "pl", "pt", "ro", "sv", "tr", "vi"),
        frozenset({"LATIN"}),
    ),
    "am": frozenset({"ETHIOPIC"}),
    "bn": frozenset({"BENGALI"}),
    "el": frozenset({"GREEK"}),
    "gu": frozenset({"GUJARATI"}),
    "he": frozenset({"HEBREW"}),
    "hy": frozenset({"ARMENIAN"}),
    "ka": frozenset({"GEORGIAN"}),
    "km": frozenset({"KHMER"}),
    "kn": frozenset({"KANNADA"}),
    "lo": frozenset({"LAO"}),
    "ml": frozenset({"MALAYALAM"}),
    "my": frozenset({"MYANMAR"}),
    "pa": frozenset({"GURMUKHI"}),
    "si": frozenset({"SINHALA"}),
    "ta": frozenset({"TAMIL"}),
    "te": frozenset({"TELUGU"}),
    "th": frozenset({"THAI"}),
}
"""The languages that are known, by their ISO 639-1 codes, with the scripts that each is written in."""
_WORDS: Final = {
    "en": """
        the a i of and to in is was are were be been it that this these those with for as on at by from not have has had
        but they their he she his her you your we our i my which who what when where how why will would can could
        should there than then if or an about into its do does did so because all also no just only very more some any
        each both after before between let us me him them one""",
    "de": """
        der die das und ist nicht ein eine einen einem einer eines den dem des zu mit sich auf für von im am an als auch
        es er sie wir ihr ich du dass daß wird werden wurde war waren sind sein seine hat haben hatte kann können muss
        aber oder wenn wie nach bei aus nur noch so um durch über vor zum zur man sehr mehr hier dann weil also alle
        diese dieser dieses mein dein uns euch was wer wo""",
    "fr": """
        le la les un une des du de et est en que qui dans pour pas ne il elle ils elles je tu nous vous on ce cette ces
        sur par plus avec sont était été être avoir ai as avons avez ont au aux se sa son ses mais ou où donc comme si
        tout tous leur leurs à qu très bien aussi fait peut même alors deux""",
    "es": """
        el la los las un una unos unas de del y e que en es por con para no se lo su sus como más pero al le les me mi
        tu te yo él ella ellos nosotros está están ser fue era son ha han hay o si sí muy también porque cuando donde
        qué cómo este esta estos estas ese esa eso sin sobre entre hasta desde todo todos puede tiene""",
    "it": """
        il lo la i gli le un uno una di del della dei delle degli e è che in non per con si da dal dalla al alla ai alle
        nel nella sono era come ma anche più questo questa questi queste io tu lui lei noi voi loro ho hai ha abbiamo
        hanno essere stato se o ci mi ti suo sua cosa perché quando dove molto tutti tutto su sul sulla""",
    "pt": """
        o a os as um uma uns umas de do da dos das e é que em no na nos nas não para por com se mais como mas ao à aos
        são foi era ser está estão ele ela eles elas eu você nós seu sua seus suas meu minha isso este esta também muito
        já ou quando onde porque pelo pela tem têm há até sem sobre entre todos pode""",
    "nl": """
        de het een en van is in dat die niet op te zijn met voor er aan als ook maar om ik je jij hij zij ze wij we u
        naar bij uit door over dan nog was werd worden wordt heeft hebben had kan kunnen moet wat wie waar hoe geen wel
        zo deze dit of tot meer zeer onze ons hun mijn omdat""",
    "sv": """
        och att det är en ett som på av för med den inte till i jag du han hon vi de har hade var om men så kan ska från
        när eller sig vid också efter bara mycket här där detta denna dessa vad vem hur sin sitt sina min mitt din ditt
        deras vara blir blev alla mot över under mellan eftersom""",
    "da": """
        og at det er en et som på af for med den ikke til i jeg du han hun vi de har havde var om men så kan skal fra
        når eller sig ved også efter kun meget her der dette denne disse hvad hvem hvor hvordan sin sit sine min mit din
        dit deres være bliver blev alle mod over under mellem fordi""",
    "pl": """
        i w na z że się nie to jest do o jak ale po co za od tak dla czy przez tym te ten ta są był była było być może
        już tylko jego jej ich ja ty on ona my oni mnie mi ci gdy gdzie kiedy który która które których także bardzo
        oraz lub albo pod przy bez więc ponieważ jeśli""",
    "cs": """
        a v na se že je to do s z o i jak ale po co za od tak pro by jsem jsi jsou být byl byla bylo může už jen jeho
        její jejich já ty on ona my oni mě mi ti když kde který která které také velmi nebo pod při bez tedy protože
        jestli ve ze ke není ten ta tím""",
    "ro": """
        și în de la cu pe nu este un o a al ale ai că să se din care pentru mai ce sau dar după prin era au sunt fi fost
        fost am ai are avea el ea ei ele eu tu noi voi lui lor acest această aceste acel foarte când unde cum dacă
        pentru fără între până doar toate tot""",
    "hu": """
        a az és hogy nem is egy ez van volt meg de csak már mint még ha vagy el fel ki be le én te ő mi ti ők azt ezt
        nagyon kell lehet lesz lett ami aki ahol amikor mert akkor itt ott után előtt között szerint minden több sem
        vannak voltak""",
    "fi": """
        ja on ei se että hän ovat oli olla mutta kun niin kuin myös minä sinä me te he joka jotka tai jos vain nyt
        sitten tämä tuo ne nämä mitä missä miksi miten koska hyvin kanssa ennen jälkeen mukaan sekä en et emme ole
        olen olemme voi voidaan vielä jo kaikki hänen sen""",
    "tr": """
        ve bir bu da de için ile çok ne gibi daha olarak ama değil mi o var yok ben sen biz siz onlar kadar sonra önce
        her şey ise ki olan oldu olur olduğu en şu ya veya hem göre tarafından üzere nasıl neden çünkü bana sana ona
        bizim benim vardır""",
    "id": """
        yang dan di ke dari untuk dengan ini itu adalah tidak pada dalam akan juga oleh saya anda kamu dia kami kita
        mereka atau karena bisa dapat sudah telah ada seperti lebih tetapi namun jika saat hanya sangat banyak semua
        apa siapa bagaimana sebuah para antara setelah sebelum tersebut menjadi""",
    "vi": """
        và của là có không được cho trong một những các này đó với để người đã sẽ đang tôi bạn anh chị chúng ta họ nó
        khi thì mà như ở từ đến về ra vào lên rất cũng nhưng vì nên hay hoặc nếu nào gì sao rằng bằng theo nhiều hơn
        phải làm""",
    "ru": """
        и в не на что он она оно они я ты мы вы с со как это а по но из у за к ко от о об же бы то так для все его ее
        её их был была было были быть есть если или когда где который которая которое которые уже только может тоже
        также очень при без до под потому чтобы мне""",
    "uk": """
        і й та в у не на що він вона воно вони я ти ми ви з із зі як це а по але від за до о про ж би то так для все
        його її їх був була було були бути є якщо або коли де який яка яке які вже тільки може також дуже при без під
        тому щоб мені""",
    "bg": """
        и в не на че той тя то те аз ти ние вие с със как това а по но от за до о също би така за всички го я ги беше
        бе са е съм си ще ако или когато къде който която което които вече само може много при без под защото да се
        един една едно му""",
    "ar": """
        في من على إلى أن إن هذا هذه ذلك تلك التي الذي الذين لا ما هو هي هم كان كانت يكون مع عن أو ثم بعد قبل كل بين قد
        لم لن ليس حيث كما لكن إذا عند أي نحن أنا أنت هناك و يا حتى منذ غير هل بن وهو وهي""",
    "fa": """
        و در به از که این را با است برای آن یک خود تا کرد بر هم نیز می شد شود بود ما من تو او آنها اما یا اگر هر چه
        چون پس بین نیست هست دارد کند کرده شده های ها بسیار همه باید""",
    "ur": """
        کے کی کا میں ہے اور سے کو پر نے یہ وہ کہ ہیں تھا تھی تھے ایک اس ان بھی نہیں ہو تو جو لیے کر ہم آپ مجھے گیا گئی
        گئے کیا بہت لیکن اگر یا جب تک ساتھ بعد والے ہوا ہوئی""",
    "hi": """
        के की का में है और से को पर ने यह वह कि हैं था थी थे एक इस उस भी नहीं हो तो जो लिए कर हम आप मुझे मैं गया गई गए
        क्या बहुत लेकिन अगर या जब तक साथ बाद वाले हुआ हुई होता होती रहा रही रहे""",
    "mr": """
        आणि आहे आहेत या हा ही हे ते तो ती च्या चे ची चा मध्ये नाही होते होता होती केले केली की पण व म्हणून तर मी तू आपण
        आम्ही तुम्ही त्या त्याच्या त्यांनी असे असा अशी एक साठी वर पासून झाले झाली काय खूप किंवा जर करून""",
}
_LETTERS: Final = {
    "cs": "áčďéěíňóřšťúůýž", "da": "æøåé", "de": "äöüß", "es": "áéíóúüñ", "fi": "äöå", "fr": "àâæçéèêëîïôœùûüÿ",
    "hu": "áéíóöőúüű", "it": "àèéìíòóù", "nl": "éëïü", "pl": "ąćęłńóśźż", "pt": "áâãàçéêíóôõú", "ro": "ăâîșşțţ",
    "sv": "åäöé", "tr": "çğıöşüâî",
    "vi": "áàâãăéèêíìóòôõúùýđơưạảấầẩẫậắằẳẵặẹẻẽếềểễệỉĩịọỏốồổỗộớờởỡợụủũứừửữựỳỵỷỹ",
    # Of scripts without ASCII letters, only what the others do not have.
    "ru": "ыэё", "uk": "іїєґ", "fa": "پچژگ", "ur": "ٹڈڑںےہ", "mr": "ळ",
}  # fmt: skip


def _inverted(lists: dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for language, items in lists.items():
        for item in dict.fromkeys(items):
            found.setdefault(item, []).append(language)
    return {item: tuple(languages) for item, languages in found.items()}


LANGUAGES_OF_WORD: Final = _inverted({language: words.split() for language, words in _WORDS.items()})
"""The languages in whose list a word stands, in lower case."""
LANGUAGES_OF_LETTER: Final = _inverted({language: list(letters) for language, letters in _LETTERS.items()})
"""The languages that are written with a letter; only of letters that not all languages of their script have."""
