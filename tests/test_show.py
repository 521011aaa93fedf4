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


def test_sentences_are_wrapped_and_tables_are_not():
    sentence = "word " * 40
    assert all(len(line) <= WIDTH for line in wrapped(sentence.strip()).split("\n"))
    row = "name  " + "1 " * 80
    assert wrapped(row) == row and wrapped("short") == "short"
