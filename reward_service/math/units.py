"""The words around a number: units and their spellings, filler, and words that qualify it."""

from __future__ import annotations

_UNITS = """
mm millimeter millimetre 毫米|cm centimeter centimetre 厘米 公分 센티미터
dm decimeter decimetre|m meter metre 米 公尺 미터
km kilometer kilometre 公里 千米 킬로미터|inch inches 英寸|ft foot feet 英尺|yd yard
mi mile 英里|nm nanometer
mg milligram 毫克|g gram gramme 克 그램|kg kilogram kilo 公斤 千克 킬로그램|t tonne ton 吨 톤
lb lbs pound|oz ounce
ms millisecond|s sec second 秒 초|min minute 分钟 분|h hr hrs hour 小时 時間 시간
day 天 일|week wk 周|month 个月|year yr 年 년
l liter litre 升 리터|ml milliliter millilitre 毫升|gal gallon|cup|pint|quart|tsp teaspoon
tbsp tablespoon
usd dollar buck ¤ 美元 달러|cent ¢ 美分|eur euro € 欧元 유로|gbp £|jpy yen 円 日元 ¥
cny yuan rmb 元 人民币 块|krw won 원 ₩
inr rupee rs ₹|degree deg degrees 度 도|rad radian|mph|kph|hz hertz|khz|mhz|n newton|j joule|kj
w watt|kw|v volt
ampere amp|k kelvin|c celsius|f fahrenheit|pa pascal|kpa|atm|mol mole|am a.m|pm p.m|kb|mb|gb|tb
bit|byte|acre|ha hectare
dozen|score|pair|个 人 名 개 명|bpm|rpm|cal calorie|kcal|ohm|db
"""
_FILLER = """
a an the of in is are was were be it its this that these those total totals altogether all there
here has have had so we you he she they i my our your his her their get gets got answer answers
final result value values equal equals therefore thus hence which what to on at by for from with
as per each every any one will would can do does if then when now only just exactly
approximately's sum difference product quotient number numbers amount area volume length
distance perimeter probability side sides long wide tall high deep away old left right remaining
solution solutions root roots x's where let yes ok final: cost costs price takes needs makes
gives equals units unit square cubic sq cu 입니다 정답은 답은 答案是 答案 是 所以 共 为 为了
정답 답 이다 입니다 이고 등은
"""
_HEDGES = """
not maybe perhaps possibly probably approximately approx about around roughly nearly almost
least most less more fewer than between either neither nor except never guess guesses unknown
undefined idk false true nan none null unsure either somewhere over under above below up least
infinite no cannot can't isn't never wrong incorrect import lambda def return exec eval print
class 或者 可能 大约 不是 约 아마 아니 약
"""


def _stem(word: str) -> str:
    """The singular of a word, good enough for comparing units."""
    for ending, new in (("ies", "y"), ("ches", "ch"), ("shes", "sh"), ("xes", "x"), ("s", "")):
        if len(word) > 3 and word.isascii() and word.endswith(ending) and not word.endswith("ss"):
            return word[: -len(ending)] + new
    return word


UNITS = {
    alias: group.split()[0]
    for line in _UNITS.split("\n")
    for group in line.split("|")
    if group.strip()
    for alias in group.split()
}
_COMPOUND = {"mph": ["mi", "h"], "kph": ["km", "h"]}
FILLER, HEDGES = set(_FILLER.split()), set(_HEDGES.split())


def known(word: str) -> bool:
    """Whether letters are a word of these tables instead of a product of variables."""
    lower = word.lower()
    return any(form in table for form in (lower, _stem(lower)) for table in (UNITS, FILLER, HEDGES))


def _unit(word: str) -> tuple[str, bool]:
    base, mark, power = word.partition("^")
    lower = base.lower().strip(".")
    name = UNITS.get(lower) or UNITS.get(_stem(lower))
    return (name or _stem(lower)) + mark + power, name is not None


def unit_of(words: list[str]) -> tuple[frozenset[str], frozenset[str]]:
    """(known units, other content words) among the words around one number, in one spelling.

    Foreign words outside of the tables are left out: they carry particles and endings that cannot
    be compared.
    """
    certain, other, power = set(), set(), ""
    for word in words:
        lower = word.lower()
        if lower in ("square", "sq", "cubic", "cu"):
            power = "^2" if lower[0] == "s" else "^3"
            continue
        name, is_unit = _unit(word)
        if is_unit:
            certain.update(_COMPOUND.get(name, [name + power]))
            power = ""
        elif lower not in FILLER and lower not in HEDGES and word.isascii() and len(word) > 1:
            other.add(name)
    return frozenset(certain), frozenset(other)


def same_unit(gold: list[str], answer: list[str]) -> bool:
    """Whether two answers agree in their units. They do if one of them names no unit."""
    (gold_units, gold_words), (units, words) = unit_of(gold), unit_of(answer)
    if gold_units and units:
        return gold_units == units
    if not (gold_units or gold_words) or not (units or words):
        return True
    return bool(gold_words & words)
