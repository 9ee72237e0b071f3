from __future__ import annotations

import pytest

from bert_ds.data.prose import is_english_sentence, prose
from bert_ds.data.sentences import sentence_splitter

DOCUMENTATION = '''\
Compute the weighted mean of the values in each group

This is the *first* paragraph, which goes on over
two lines and mentions :class:`~package.module.Thing` as well. It calls
`self._secret.method()` in a sentence that cannot be kept. See PEP 8 or
the `user guide <https://example.org/guide>`_ for all of the details [1]_.

.. note:: A note may start at once, and it may then go on
   in the lines that are below it.

.. code-block:: python

    The code in this block is not a sentence that we want.

.. versionadded:: 2.0
   The directive has some text that is not wanted.

An example of the use is shown in the following block::

    This block is indented and it is the code of the example.

* The first item of the list is a sentence.
* The second item of the list goes on
  in a second line of its own.

>>> print("This is the output of a doctest that we drop.")
This is the output of a doctest that we drop.

Parameters
----------
values : array
    The values that are given to the function as a parameter.

Notes
-----
The notes of a function are real text, and so they are kept.

Returns:
    The value that is returned by the function in the end.

:param values: The field of a parameter is not what we want.
| A row | of a table that is not text in the sense of this. |
+-------+------------+
El resultado de la función es una lista de los valores.
def function(values): return the sum of the values in it.
Where the thing is of a kind that can be used for.
'''


def test_prose_is_kept_and_everything_else_dropped() -> None:
    assert prose(DOCUMENTATION, sentence_splitter("sentencex")) == [
        "Compute the weighted mean of the values in each group.",
        "This is the first paragraph, which goes on over two lines and mentions Thing as well. "
        "See PEP 8 or the user guide for all of the details.",
        "A note may start at once, and it may then go on in the lines that are below it.",
        "The first item of the list is a sentence.",
        "The second item of the list goes on in a second line of its own.",
        "The notes of a function are real text, and so they are kept.",
    ]


def test_markdown_and_google_style() -> None:
    documentation = '''\
Loads the model from a [folder](https://example.org) that was saved before.

```python
The code within the fences is not a part of the text.
```

Args:
    path: The path of the folder that holds the model.

The `model` is then **ready** to be used for the evaluation.
'''
    assert prose(documentation, sentence_splitter("sentencex")) == [
        "Loads the model from a folder that was saved before.",
        "The model is then ready to be used for the evaluation.",
    ]


@pytest.mark.parametrize("sentence", [
    "This method returns the number of items in the list.",
    'It is called "eager" by most of the people (e.g. by us).',
    "Is this value really what you want to use?",
])
def test_english(sentence: str) -> None:
    assert is_english_sentence(sentence)


@pytest.mark.parametrize("sentence", [
    "Too short.", "this does not start as a sentence of the text does.", "This one has no end of a sentence",
    "The value of x is x = 3 in this case.", "It calls foo.bar in the middle of the night.",
    "Cette phrase n'est pas du tout anglaise, mais elle est longue.", "The list can be either.",
    "See https://example.org for the rest of the text.", "The (parenthesis is not closed in this sentence.",
    "Array tensor matrix vector scalar number quantity.", "It is naïve to keep this one in the text.",
])
def test_not_english(sentence: str) -> None:
    assert not is_english_sentence(sentence)
