"""Numbers in text: each is read whole, or what stands there is no number."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.algo.numbers import after_hashes, answer_number, last_number

READ = {
    "plain": "18=18 18.=18 18.50=18.5 .5=.5 007=7 -0=0 24?=24 24!=24 5th=5",
    "commas": "1,250=1250 1,234,567.8=1234567.8 1{,}000=1000 1\u00a0000=1000"
    " 1\u202f000\u202f000=1e6"
    r" 1\,000=1000",
    "currency": r"$18=18 -$18=-18 $-18=-18 $1,250.00.=1250 \$5=5 US$5=5 $7$=7 $-7$=-7",
    "signs": "\u22127=-7 \u20137=-7 +7=7 (-5)=-5 -(5)=-5 **-5**=-5 -\u00bd=-1/2",
    "fractions": "3/4=3/4 -3/4=-3/4 1.5/2=3/4 1\u20442=1/2"
    r" 48/2=24 \frac{3}{2}=3/2 \dfrac{1}{2}=1/2"
    r" \tfrac12=1/2 -\frac{3}{4}=-3/4 \frac{-3}{4}=-3/4 \frac{3}{-4}=-3/4 \frac{1,000}{3}=1000/3"
    r" \boxed{\frac{3}{2}}=3/2 $\boxed{-\frac{3}{2}}$=-3/2 \left(\frac{1}{2}\right)=1/2 ½=1/2"
    r" 3½=7/2 3\frac{1}{2}=7/2 -2\tfrac{3}{4}=-11/4",
    "powers": r"1.5e3=1500 1.5E-3=.0015 1.5×10^3=1500 1.5*10^-3=.0015 1.5×10⁶=1.5e6 10^{-2}=.01"
    r" 6.02\times10^{23}=6.02e23 -10^3=-1000 5e+2=500",
    "units": r"25%=25 50\%=50 5cm=5 5km/h=5 $5/hour=5 90^\circ=90 90°=90 5m²=5 5-year-old=5"
    r" 5\text{cm}^2=5",
    "wrapped": r"\boxed{42}=42 \boxed{-42}=-42 <answer>5</answer>=5 `7`=7"
    r" **42**=42 {3}=3 [24]=24 answer:24=24 \(7\)=7",
}
SPACED = {
    "x = - 5": "-5", "x = \u2212 5": "-5", "the answer is - 5": "-5", "The answer is -5.": "-5",
    "- 5": "-5", "- $5": "-5", "= \u2212\u20095": "-5", "minus 5": "-5", "negative $5": "-5",
    "- \\frac{3}{4}": "-3/4", "**Answer:** -5": "-5",
    "3 / 4": "3/4", "3 1/2": "7/2", "-3 1/2": "-7/2", "3 \\frac12": "7/2", "3 ½": "7/2",
    "12 1/2 hours": "25/2", "3/4 cup": "3/4",
    "1.5 x 10^3": "1500", "3.5 million": "3500000", "5 m^2": "5", "9.8 m/s^2": "9.8",
    "5\\ \\text{cm}^2": "5", "5 kg of CO2": "5", "H2O: 5 l": "5", "5 %": "5",
    "3 apples, 5 pears": "5", "7, then 100.9": "100.9", "on day 3, 5 remain": "5",
    "Step 1: 5": "5", "Step 1. 5": "5", "Step 3 \\boxed{5}": "5", "12 x 3 = 36": "36",
    "7 minus 5\n2": "2", "<<48+24=72>>72": "72", "x_1=5": "5",
    "2 dozen eggs": "24", "3 millions": "3000000", "5 = x_{1}": "5", r"\mathsf{5}": "5",
    r"\boldsymbol{-5}": "-5", r"\textcolor{red}{5}": "5", r"x \to 5": "5",
    "<b>5</b>": "5", "5<br>": "5", "5 sec": "5", "5 min": "5", "| -3 |": "-3", "5...": "5",
}  # fmt: skip
UNREAD = [
    "", "none", "...", "1" * 5000, "5/0", "1/2/3", "3 5/2",
    "16-7", "16 - 7", "16 -7", "(3)-7", "x-7", "x - 7", "x + 7", "2x + 7", "7 minus 5", "5 * x",
    "2^3", "2^{10}", "5²", "2x", "5i", "2e", "3π", r"3\pi", "π/2", "x/5", "5/x", "1//2", "3(5)",
    r"2\sqrt{3}", r"\sqrt{2}/2", "sqrt(5)", r"\log_2 8", "log(-5)", "f(5)", "3 x 5", r"2\cdot 3",
    r"\frac{a}{5}", r"\frac{5}{a}", r"\frac{3\pi}{4}", r"\frac{1}{\sqrt{2}}", r"\frac{\frac12}{3}",
    r"\frac{1}{2}x", r"x\frac{1}{2}", r"\frac123",
    "3, 5", "(3, 5)", r"\boxed{3, 5}", "3 or 5", "3 and 5", "x = 3 or x = 5", "$3$ and $5$", "3 5",
    "7;8", "3 and 1/2", "5-7", "5\u20137", "$3-$5", "5 to 7", "between 5 and 7", "5 ± 1",
    "5 +/- 1", "3 out of 5", "x > 5", r"x \geq 5", "≠ 5",
    "1 hour 30 minutes", "18 dollars and 50 cents", "3 feet 2 inches",
    "1.5.2", "1,5", "1,25", "1,2345", "12,34,567", "1.234,56", "1 000", "1'000", "1_000", "101_2",
    "1..5", "3:30", "3 : 4", "2024-05-01", "12/25/2024", "No.5", "0x1F", "1e1000", "20k",
    "2 hundred thousand", "--5", "+-5",
    "42<unused900>", "42 <unused0>.", "\\boxed{42}<unused0>", "<unused900>42", "<unused9> (42)",
    "4<unused700>2", "<unused0>", "<unused0><unused1>",
    r"0.\overline{3}", r"0.3\overline{6}", r"1.\bar{3}", "0.(3)", "0.333...", "0.3…", r"0.3\ldots",
    r"\lfloor 5.5 \rfloor", "⌈2.3⌉", "floor(2.5)", "abs(-3)", "|-3|", r"\left|-3\right|",
    r"\lvert -3 \rvert", r"\arctan 1", r"\sec{5}",
    "5 (mod 7)", r"x \equiv 5 \pmod{7}", r"5 \bmod 7", "5_{8}", r"12_{\text{five}}",
    r"5 \choose 2", "3 of 5", "50% of 20",
    r"(-\infty, 5]", r"[0, \infty)", "[0, ∞)", "1, 2, ..., 9", "x=1, y=2", "x = 3, y = 5",
    r"\boxed{5} or \boxed{7}", r"\boxed{5}\text{ and }\boxed{7}",
    "x<5", "x>5", "<5", "5<x", "5 < x", r"5 \leqslant x", r"x \gt 5", r"x \geqslant 5",
    "5 +", "42-", "1/", r"5 \times", "½5",
]  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_one_number_is_read_however_it_is_written(kind):
    for case in READ[kind].split(" "):
        text, _, number = case.rpartition("=")
        assert (text, last_number(text)) == (text, Fraction(number))
        assert (text, after_hashes(f"so\n####{text}")) == (text, last_number(text))


@pytest.mark.parametrize("text", SPACED)
def test_the_last_number_of_a_text(text):
    assert last_number(text) == Fraction(SPACED[text])


@pytest.mark.parametrize("text", UNREAD)
def test_what_is_not_one_number_is_none_and_never_a_part_of_it(text):
    assert last_number(text) is None
    assert after_hashes(f"#### {text}") is None
    assert answer_number(f"1 + 1 = 2 #### {text}") is None


def test_the_first_number_behind_the_last_hashes_counts():
    assert after_hashes("#### 71\nno:\n#### 72 clips, not 71\n73") == 72
    assert after_hashes("####\n72") is None
    assert answer_number("7 and more") == 7


@given(st.integers(-(10**12), 10**12), st.integers(0, 4))
def test_numbers_print_and_read_back_with_commas_currency_and_decimals(number, decimals):
    exact = Fraction(number, 10**decimals)
    plain = f"{abs(number) // 10**decimals:,}"
    if decimals:
        plain += f".{abs(number) % 10**decimals:0{decimals}d}"
    sign = "-" if number < 0 else ""
    for text in (sign + plain, f"{sign}${plain}.", f"It costs {sign}{plain} in all"):
        assert last_number(text) == exact


@given(st.integers(-99, 99), st.integers(1, 99), st.sampled_from(["{}/{}", r"\frac{{{}}}{{{}}}"]))
def test_fractions_read_back_and_the_other_sign_is_another_number(top, bottom, form):
    text = form.format(top, bottom)
    assert last_number(text) == Fraction(top, bottom)
    assert last_number(f"x = - {text.replace('-', '')}") == -abs(Fraction(top, bottom))


@given(st.text(alphabet="0123456789,.-/$eE+#% \n\u2212\\frac{}^x½()", max_size=40))
def test_no_text_breaks_the_number_reader(text):
    for found in (last_number(text), after_hashes(text)):
        assert found is None or isinstance(found, Fraction)
