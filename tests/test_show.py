"""Claims about what a chapter prints when it runs as a script."""

from chapters.support.show import WIDTH, headings, wrapped

SCRIPT = r"""# %% [markdown]
# # 3. Sums
#
# **How do $p$ ranks
# add up?**
#
# More text.
#
# ## 3.1 Two operations
#
# *Core, 4 minutes.*
#
# A rank calls `isend`, or
# $\text{irecv}$ for $\tanh x$. Both return at once.

# %%
x = 1
"""


def test_a_section_is_printed_with_its_first_sentence():
    first, second = (text for _, text in headings(SCRIPT))
    assert first == "\n3. Sums\n=======\nHow do p ranks add up?"
    assert second == "\n3.1 Two operations\n~~~~~~~~~~~~~~~~~~\nA rank calls isend, or irecv for tanh x."


def first_sentence(text):
    """Return what a script prints below the heading of a section with this text."""
    section = "\n".join(
        ["# %% [markdown]", "# ## 3.1 A section", "#", *(f"# {line}".rstrip() for line in text.split("\n"))]
    )
    ((_, printed),) = headings(section)
    return printed.split("\n", 3)[3]


def test_a_link_is_printed_as_its_text():
    assert first_sentence("A GPT ([chapter\n2](02_gpt.ipynb)) has layers.") == "A GPT (chapter 2) has layers."


def test_formulas_are_printed_without_tex():
    assert first_sentence(r"For $m \ge 2$ it is $2^{-24} \cdot \alpha$.") == "For m >= 2 it is 2^(-24) * alpha."
    assert first_sentence("It is\n\n$$x = 1$$") == "It is ..."


def test_a_sentence_ends_after_a_digit_and_a_capital():
    assert first_sentence("It is 1/9. Where is the zero?") == "It is 1/9."
    assert first_sentence("It ends the V. (An aside.) More.") == "It ends the V."
    assert first_sentence("Loshchilov et al. 2019 say it. More.") == "Loshchilov et al. 2019 say it."


def test_a_lead_is_printed_with_its_sentence():
    assert first_sentence("**The norm.** Clipping needs it. More.") == "The norm. Clipping needs it."


def test_an_exercise_is_passed_over():
    text = "**[Exercise 6](e06.py)** asks for it.\n\nNow the step. More."
    assert first_sentence(text) == "Now the step."


def test_sentences_are_wrapped_and_tables_are_not():
    sentence = "word " * 40
    assert all(len(line) <= WIDTH for line in wrapped(sentence.strip()).split("\n"))
    row = "name  " + "1 " * 80
    assert wrapped(row) == row and wrapped("short") == "short"
