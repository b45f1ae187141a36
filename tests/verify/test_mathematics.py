r"""`math`: final answers as mathematics; and verifiers with the names of other libraries."""

from __future__ import annotations

import string
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy.parsing import sympy_parser

from flowrl.config.rewards import PeerMatch
from flowrl.config.section import kinds_of
from flowrl.errors import ConfigError, RewardError
from flowrl_backends.verify import boxed_equality
from flowrl_backends.verify.boxed_equality import MATHRULER, PRIME, SLIME
from flowrl_backends.verify.mathematics import final_answer, is_equal, normalized
from flowrl_backends.verify.options import TermOptions
from flowrl_backends.verify.peers import PEERS
from flowrl_backends.verify.rules import open_rule

EQUAL = [
    (r"5 \text{ cm}^2", "5"),
    (r"\$5", "5"),
    (r"72^{\circ}", "72"),
    (r"5\,\text{m/s}", "5"),
    (r"2.5\text{ million}", "2500000"),
    (r"x=1 \text{ or } x=2", "1,2"),
    (r"x \in [0,1)", "[0,1)"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty,2)\cup(3,\infty)"),
    (r"\text{Yes}", "yes"),
    ("101_2", "101_{2}"),
    ("1 1/2", "1.5"),
    (r"3\times10^8", "300000000"),
    ("1+2i", "2i+1"),
    (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\begin{pmatrix}1 & 2\\ 3 & 4\end{pmatrix}"),
    ("10!", "3628800"),
    (r"\frac{3}{-4}", "-0.75"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("0.5x+0.5", r"\frac{x+1}{2}"),
    ("f(x)=2x+1", "2x+1"),
    (r"\left\{ 1, 2 \right\}", r"\{2,1\}"),
    ("(B) 42", "B"),
    (r"50\%", "0.5"),
    ("1,000,000", "1000000"),
    ("5²", "25"),
    ("3½", "3.5"),
]
DIFFERENT = [
    ("5", "-5"),
    ("0.33", r"\frac{1}{3}"),
    ("[1,2]", "(1,2)"),
    ("(2,1)", "(1,2)"),
    ("1-2i", "2i+1"),
    ("y = 2x+3", "y=2x+1"),
    (r"\text{Monday}", "Tuesday"),
    ("a", "b"),
    ("5:31", "5:30"),
    (r"\begin{pmatrix}1\\3\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("", "4"),
    ("C", "B"),
    ("10,000", "10"),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_answers_of_one_value_are_equal(answer, truth):
    assert is_equal(answer, truth)


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_answers_of_other_values_are_not(answer, truth):
    assert not is_equal(answer, truth)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1} no: $\boxed{\frac{1}{2}}$ ends it.", r"\frac{1}{2}"),
        (r"so \boxed 42", "42"),
        ("48 clips.\n#### 72 clips", "72 clips"),
        ("The answer is 18, checked 2 times.", "18"),
        ("The final answer is $42$. I hope it is correct.", "42"),
        ("**Answer:** 42", "42"),
        (r"<think>\boxed{1}</think><answer>so \boxed{2}</answer> thanks", "2"),
        ("I add them.\n\nSo $a=3$ and thus $b=4$.", "b=4"),
        ("I think 5.\n\nThe total is 12 apples.", "The total is 12 apples."),
        ("", None),
    ],
)
def test_the_final_answer_of_a_response(response, answer):
    found = final_answer(response)
    assert found == answer or (answer is None and not found)


def test_every_verifier_of_another_library_can_be_configured():
    assert set(kinds_of(PeerMatch)) == set(PEERS)


@pytest.mark.parametrize("name", ["mindrlhf_accuracy", "slime_math_dapo"])
def test_an_answer_that_the_named_function_cannot_read_is_an_error(name):
    with pytest.raises(RewardError, match="the reference answer"):
        PEERS[name]("Answer: 4", "four")


LATEX = st.lists(
    st.sampled_from(
        [
            *r"\{}()[]^_$#.,=%!&<> ",
            *"0159ax",
            r"\frac",
            r"\sqrt",
            r"\boxed{",
            "####",
            "Answer:",
            "−",
        ]
    ),
    max_size=24,
).map("".join)
QUICK = sorted(name for name in PEERS if "verify" not in name and "accuracy_gold" not in name)


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=200), LATEX), st.one_of(st.text(max_size=40), LATEX))
def test_any_text_has_a_normal_form_and_a_score_by_every_quick_verifier(response, answer):
    assert isinstance(normalized(response), str)
    final_answer(response)
    for name in QUICK:
        try:
            assert -1.0 <= PEERS[name](response, answer) <= 1.0
        except RewardError:
            assert name in ("mindrlhf_accuracy", "slime_math_dapo")


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=string.digits + r"+-x\{}^/,.() ", max_size=12))
def test_every_answer_is_equal_to_itself_unless_nothing_is_left_of_it(answer):
    assert is_equal(answer, answer) == bool(normalized(answer))


@pytest.mark.parametrize("grader", [SLIME, MATHRULER, PRIME])
def test_text_in_quotation_marks_is_never_evaluated(grader):
    half = r"re('\textbackslash{}061/2')"  # what is in the quotes reaches sympy as \061/2
    assert not grader.is_equal(half, "1/2")
    assert not grader.is_equal(half.replace("'", '"'), "1/2")


@pytest.mark.parametrize(
    "text", ["x.x*0", "(x.xx)-(x.xx)", "x_x-x_x", "[x][0]-x", "(x:=1)-1", "{x}-x"]
)
def test_no_syntax_of_python_beyond_arithmetic_reaches_the_parser(monkeypatch, text):
    monkeypatch.setattr(sympy_parser, "parse_expr", lambda *args, **options: pytest.fail(text))
    assert not boxed_equality._is_zero(text)


@pytest.mark.parametrize(
    ("kind", "needs"), [("slime_boxed_grade", "pylatexenc"), ("verl_math_verify", "math_verify")]
)
def test_a_verifier_asks_only_for_libraries_that_it_uses(monkeypatch, kind, needs):
    for name in ("math_verify", "pylatexenc"):
        monkeypatch.setitem(sys.modules, name, None)
    for own in ("verl_math_dapo", "verl_math_boxed", "msrl_strict_format"):
        open_rule(own, TermOptions({}, "rewards.terms[0]"))
    with pytest.raises(ConfigError, match=rf"terms\[0\]\.kind.*{needs}") as caught:
        open_rule(kind, TermOptions({}, "rewards.terms[0]"))
    assert "flowrl[math]" in str(caught.value)
