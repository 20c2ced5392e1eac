"""Text that tokenizers are compared on: many scripts, code, numbers, marks, and what is odd.

Deterministic, so that a proof repeats. About 860,000 characters.
"""

# ruff: noqa: RUF001  letters that look alike are the point

import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator
from random import Random

# First and last code point of blocks in use, some with unassigned points among them.
_BLOCKS = (
    (0x0000, 0x007F), (0x0080, 0x00FF), (0x0100, 0x024F), (0x0250, 0x02AF), (0x0300, 0x036F), (0x0370, 0x03FF),
    (0x0400, 0x052F), (0x0530, 0x058F), (0x0590, 0x05FF), (0x0600, 0x06FF), (0x0700, 0x074F), (0x0780, 0x07BF),
    (0x0900, 0x097F), (0x0980, 0x09FF), (0x0A00, 0x0A7F), (0x0A80, 0x0AFF), (0x0B00, 0x0B7F), (0x0B80, 0x0BFF),
    (0x0C00, 0x0C7F), (0x0C80, 0x0CFF), (0x0D00, 0x0D7F), (0x0D80, 0x0DFF), (0x0E00, 0x0E7F), (0x0E80, 0x0EFF),
    (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x137F), (0x13A0, 0x13FF),
    (0x1400, 0x167F), (0x1780, 0x17FF), (0x1800, 0x18AF), (0x1E00, 0x1EFF), (0x1F00, 0x1FFF), (0x2000, 0x206F),
    (0x2070, 0x209F), (0x20A0, 0x20CF), (0x2100, 0x214F), (0x2190, 0x21FF), (0x2200, 0x22FF), (0x2300, 0x23FF),
    (0x2460, 0x24FF), (0x2500, 0x25FF), (0x2600, 0x27BF), (0x2C00, 0x2C5F), (0x2E80, 0x2FDF), (0x3000, 0x303F),
    (0x3040, 0x30FF), (0x3100, 0x312F), (0x3130, 0x318F), (0x3200, 0x33FF), (0x3400, 0x34FF), (0x4E00, 0x9FFF),
    (0xA000, 0xA48F), (0xA640, 0xA69F), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xF900, 0xFAFF), (0xFB00, 0xFDFF),
    (0xFE00, 0xFE6F), (0xFF00, 0xFFEF), (0xFFF0, 0xFFFF), (0x10000, 0x100FF), (0x10330, 0x1034F), (0x10400, 0x1044F),
    (0x12000, 0x123FF), (0x1D400, 0x1D7FF), (0x1F000, 0x1F2FF), (0x1F300, 0x1F6FF), (0x1F900, 0x1FAFF),
    (0x20000, 0x201FF), (0xE0000, 0xE007F), (0x10FFF0, 0x10FFFF),
)  # fmt: skip

_SENTENCES = (
    "The quick brown fox doesn't jump; it's lazy, they've said, and we'll SHOUT: \"DON'T!\" – I'd rather not.",
    "Größe, Übermut und Ärger – „so ist's“, sagte er. Donaudampfschifffahrtsgesellschaft; 3,5 % von 1.000 €.",
    "L'élève n'a qu'à s'asseoir : « Ça va ? » Où est-ce qu'il était, hier, à 18h30 ?",
    "¿Cuántos años tienes? ¡Señor, mañana será otro día! El pingüino comió jamón ibérico.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Температура −40 °C, ёжик.",
    "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία· ἐν ἀρχῇ ἦν ὁ λόγος.",
    "敏捷的棕色狐狸跳过了懒狗。二〇二六年,人工智能的发展速度超出了预期!「引号」、《书名》……",
    "いろはにほへと ちりぬるを。カタカナとひらがな、漢字が混ざった文章です。ヴァイオリン、ー〜!?",
    "다람쥐 헌 쳇바퀴에 타고파. 서울특별시 강남구 테헤란로 152, 3층입니다.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر، ١٢٣٤٥٦٧٨٩٠؛ السَّلامُ عَلَيْكُم؟",
    "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה — שָׁלוֹם עוֹלָם, abc 123 מימין לשמאל.",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले। क्ष त्र ज्ञ १२३।",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน ๑๒๓๔",
    "Tiếng Việt có dấu: phở, nước mắm, Nguyễn Thị Hồng; đường Lê Lợi, quận 1.",
    "நான் தமிழில் எழுதுகிறேன். ಕನ್ನಡ, తెలుగు, മലയാളം, বাংলা, ગુજરાતી, ਪੰਜਾਬੀ, සිංහල, မြန်မာ, ქართული, አማርኛ.",
    "İstanbul'da ışık, ÇĞİÖŞÜ çğıöşü; ﬁne ﬂour, ǅ ß ẞ ſ K Å; e\u0301 é, n\u0303 ñ, A\u030a Å, 각 \u1100\u1161\u11a8.",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇯🇵 ❤️‍🔥 ☎️ 1️⃣ 🏴󠁧󠁢󠁳󠁣󠁴󠁿 ©️ ™ ½ ⅔ ² ³ ₁ Ⅳ ㎏ ① (╯°□°)╯︵ ┻━┻",
)


def texts(seed: int = 0) -> Iterator[str]:
    """The sample, text by text."""
    rng = Random(seed)
    yield from _SENTENCES
    yield "\n\n".join(_SENTENCES)
    for first, last in _BLOCKS:
        points = range(first, last + 1)
        yield _text(points if len(points) < 512 else rng.sample(points, 512))
        for _ in range(4):  # as words, between Latin ones
            yield " ".join(_text(rng.choices(points, k=rng.randint(1, 9))) + rng.choice("aZ0'.-_") for _ in range(40))
    # Natural English and code; the standard library's own, as far as this process has it anyway.
    for module in (inspect, json, textwrap):
        source = inspect.getsource(module)
        yield from (source[at : at + 8192] for at in range(0, min(len(source), 65_536), 8192))
    yield from _odd(rng)
    for _ in range(4000):
        yield "".join(rng.choice(_PIECES) if rng.random() < 0.9 else _text([rng.randrange(0xD800)]) for _ in range(60))


# fmt: off
_PIECES = (
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u200b", "\u200d", "\ufeff"),
    *("'s", "'S", "'ll", "'LL", "’t", "'re", "n't", "don", "the", "The", "THE", "HTTPServer", "snake_case", "camelX"),
    *("0", "7", "42", "123", "1234", "12345678", "3.14159", "1e-9", "0xFF", "١٢٣", "１２３", "½"),
    *("...", "…", "--", "—", "!?", "($)", "#!", "/*", "*/", "<|", "|>", "</s>", "<s>", "[INST]", "{{", "}}", "\\n"),
    *("é", "e\u0301", "ß", "ñ", "Ж", "я", "中", "文", "かな", "한글", "ع", "ש", "क्ष", "ไทย", "😀", "👍🏽", "\x00"),
)
# fmt: on


def _odd(rng: Random) -> Iterator[str]:
    """Runs, structures and borders."""
    yield ""
    for character in " \n\t.-=a0Aé中😀\x00":
        for n in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 129, 1000):
            yield character * n
            yield f"x{character * n}y"
    yield " ".join(str(rng.randrange(10 ** rng.randint(1, 30))) for _ in range(500))
    yield "\n".join(f"{rng.uniform(-1e6, 1e6):,.{rng.randint(0, 9)}f}" for _ in range(300))
    rows = [{"id": i, "name": rng.choice(_SENTENCES)[:20], "ok": i > 9, "x": [None, 1.5e-7, -i]} for i in range(60)]
    yield json.dumps(rows)
    yield json.dumps(rows, ensure_ascii=False, indent=2)
    yield "".join(rng.choice("ACGT") for _ in range(4000))
    yield "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(2000))
    yield "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/") for _ in range(8000))
    yield "\n".join("    " * rng.randint(0, 6) + rng.choice(("if x:", "return y", "}", "// ok")) for _ in range(400))
    yield "".join(_text([rng.choice((0x41, 0x5D0, 0x627, 0x4E2D)) + rng.randrange(20)]) for _ in range(2000))


def _text(points: Iterable[int]) -> str:
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
