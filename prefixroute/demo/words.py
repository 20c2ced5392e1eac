"""Text of an exact length: one token a word, for the simulated servers and about so for a real tokenizer.

Each word is a space and three letters: four bytes, which is one token by every estimate in this package, and one
token to most vocabularies of real models, too.
"""

from hashlib import shake_128

WORD_BYTES = 4

_VOCABULARY = """
ace act add age ago aid aim air all and any arc are arm art ash ask ate bad bag ban bar bat bay bed bee beg bet
bid big bin bit bow box boy bud bug bun bus but buy cab can cap car cat cow cry cup cut dad dam day den did die
dig dim dip dog dot dry due dug ear eat egg end era eve eye fan far fat fee few fig fin fit fix flu fly fog for
fox fun fur gap gas gem get god got gum gun gut guy gym had ham has hat her hid him hip his hit hop hot how hub
ice ill ink inn ion its jam jar jaw jet job jog joy key kid kin kit lab lap law lay led leg let lid lie lip lit
log lot low mad man map mat may men met mid mix mob mom mud mug net new nod nor not now nut odd off oil old one
our out owl own pad pan pay pea pen pet pie pig pin pit pod pop pot put ran rat raw ray red rod row rub rug run
sad sat saw say sea see set sew she shy sir sit six sky sly son spy sum sun tab tag tan tap tar tax tea ten the
tie tin tip toe ton too top toy try tub two use van vet vow war was wax way web wed wet who why win wit won yes
yet you zip zoo
"""
_WORDS = [" " + word for word in _VOCABULARY.split()]


def spelled(number: int, n_words: int = 8) -> str:
    """`number`, which is at least 0 and below 256^`n_words`, in words: other numbers differ, nearly always at once."""
    return "".join([_WORDS[byte] for byte in number.to_bytes(n_words, "little")])


def text(name: str, n_words: int) -> str:
    """`n_words` words, always the same for `name`, with nothing in common with those for another."""
    return "".join([_WORDS[byte] for byte in shake_128(name.encode()).digest(n_words)])
