r"""Answers of the kinds that MATH has: (gold, equal ones, different ones) each.

Written for this project: 128 pairs are equal, 107 are not.
"""

PAIRS = {
  "fractions": [
    (
      r"\frac{3}{4}",
      [r"\dfrac{3}{4}", "3/4", "0.75", r"\frac34", r"\frac{6}{8}"],
      ["4/3", r"\frac{3}{5}", "0.7"],
    ),
    (
      r"-\frac{7}{2}",
      [r"\frac{-7}{2}", "-3.5", r"-\dfrac72", r"\frac{7}{-2}"],
      [r"\frac{7}{2}", r"-\frac{2}{7}"],
    ),
    (r"2\frac{1}{3}", [r"\frac{7}{3}", "7/3"], [r"\frac{2}{3}", r"\frac{21}{3}"]),
    (
      r"\frac{a+b}{2}",
      [r"\frac{b+a}{2}", r"\frac12(a+b)", r"\frac{a}{2}+\frac{b}{2}"],
      [r"\frac{a-b}{2}", r"a+\frac{b}{2}"],
    ),
  ],
  "radicals": [
    (
      r"2\sqrt{3}",
      [r"\sqrt{12}", r"2\cdot\sqrt3", r"\sqrt{3}\cdot 2"],
      [r"3\sqrt{2}", r"\sqrt{6}"],
    ),
    (
      r"\frac{\sqrt{2}}{2}",
      [r"\frac{1}{\sqrt{2}}", r"\sqrt{\frac12}"],
      [r"\sqrt{2}", r"\frac{\sqrt{3}}{2}"],
    ),
    (r"3+\sqrt{5}", [r"\sqrt{5}+3"], [r"3-\sqrt{5}", r"\sqrt{8}"]),
    (r"\sqrt[3]{4}", [r"4^{1/3}", r"2^{2/3}"], [r"\sqrt{4}", r"3\sqrt{4}"]),
    (r"\sqrt{7+4\sqrt{3}}", [r"2+\sqrt{3}"], [r"2-\sqrt{3}"]),
  ],
  "intervals": [
    (
      r"[2,5)",
      [r"\left[2,5\right)", "[2, 5)", r"x \in [2,5)"],
      ["[2,5]", "(2,5)", "[2,6)"],
    ),
    (
      r"(-\infty, 3]",
      [r"\left(-\infty, 3\right]", r"(-\infty,3]"],
      [r"(-\infty, 3)", r"[3,\infty)"],
    ),
    (
      r"(-\infty,-1)\cup(1,\infty)",
      [
        r"(1,\infty)\cup(-\infty,-1)",
        r"\left(-\infty,-1\right) \cup \left(1,\infty\right)",
      ],
      [r"(-1,1)", r"(-\infty,-1]\cup[1,\infty)"],
    ),
    (
      r"[0,\frac{1}{2}]",
      [r"[0, 0.5]", r"\left[0,\dfrac{1}{2}\right]"],
      [r"[0,\frac{1}{3}]"],
    ),
  ],
  "sets": [
    (
      r"\{1,2,3\}",
      [r"\{3,2,1\}", r"\left\{1,2,3\right\}", r"\{1, 3, 2\}"],
      [r"\{1,2\}", r"\{1,2,4\}"],
    ),
    ("1, -2", ["-2, 1", r"-2,1"], ["1, 2", "1"]),
    (r"\{\frac12, \sqrt{2}\}", [r"\{\sqrt2, 0.5\}"], [r"\{\frac12, 2\}"]),
    (r"\emptyset", [r"\varnothing", r"\{\}"], [r"\{0\}", "0"]),
  ],
  "tuples": [
    (r"(3,-4)", [r"\left(3,-4\right)", "(3, -4)"], ["(-4,3)", "(3,4)", "(3,-4,0)"]),
    (
      r"\left(\frac{1}{2}, \sqrt{3}\right)",
      [r"(0.5,\sqrt{3})", r"(\tfrac12, \sqrt3)"],
      [r"(\sqrt{3},\frac12)"],
    ),
    ("(1,2),(3,4)", ["(1,2), (3,4)"], ["(1,2)", "(1,2),(3,5)"]),
    (r"\left(3,\frac{\pi}{2}\right)", [r"(3,\pi/2)"], [r"(3,\pi)", r"(\pi/2, 3)"]),
  ],
  "matrices": [
    (
      r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
      [
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
      ],
      [r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"],
    ),
    (
      r"\begin{pmatrix}-1\\\frac{1}{2}\end{pmatrix}",
      [
        r"\begin{pmatrix} -1 \\ 1/2 \end{pmatrix}",
        r"\begin{pmatrix} -1 \\ 0.5 \end{pmatrix}",
      ],
      [r"\begin{pmatrix} 1 \\ 1/2 \end{pmatrix}"],
    ),
  ],
  "polynomials": [
    (
      "x^2+2x+1",
      ["(x+1)^2", "1+2x+x^2", "x^{2} + 2x + 1"],
      ["x^2+2x-1", "x^2+1", "(x-1)^2"],
    ),
    ("(x-2)(x+2)", ["x^2-4", "(x+2)(x-2)"], ["x^2+4", "(x-2)^2"]),
    ("6a^2b", [r"6a^{2}b", r"6 b a^2", r"6\cdot a^2\cdot b"], ["6ab^2", "6a^2"]),
    (
      r"\frac{x+1}{x-1}",
      [r"\frac{1+x}{x-1}", r"-\frac{x+1}{1-x}", r"1+\frac{2}{x-1}"],
      [r"\frac{x-1}{x+1}"],
    ),
    ("2^{10}", ["1024", r"4^5"], ["2048", "20"]),
  ],
  "degrees": [
    (
      r"60^\circ",
      ["60", r"60^{\circ}", r"60\text{ degrees}", r"60^\circ"],
      [r"30^\circ", r"60.5^\circ"],
    ),
  ],
  "percentages": [
    (r"25\%", ["25", r"25 \%", r"25\text{ percent}"], ["2.5", r"20\%"]),
  ],
  "units and money": [
    (
      r"12\text{ cm}",
      ["12", r"12 \text{ cm}", r"12\mathrm{~cm}"],
      [r"13\text{ cm}", "120"],
    ),
    (r"\$18.50", ["18.50", "18.5", r"\$18.5"], [r"\$18", r"\$185"]),
    (r"10,000", ["10000", r"10{,}000", r"10\,000"], ["1000", "10,001"]),
    (r"36\pi\text{ square units}", [r"36\pi", r"36\pi \text{ units}^2"], ["36", r"6\pi"]),
  ],
  "text": [
    (
      r"\text{Evelyn}",
      ["Evelyn", r"\text{Evelyn}", r"\textbf{Evelyn}", r"\text{evelyn}"],
      [r"\text{Evan}", r"\text{Angela}"],
    ),
    (r"\text{(C)}", ["C", "(C)", r"\text{C}", r"\mathrm{(C)}"], ["(B)", "D"]),
    (r"\text{even}", ["even"], ["odd", r"\text{neither}"]),
    (r"\text{Monday}", ["Monday", r"\text{ Monday}"], ["Tuesday"]),
    (r"\text{hyperbola}", ["hyperbola"], ["parabola", "ellipse"]),
    (
      r"\text{no solution}",
      [r"\text{no solution}", "no solution"],
      ["1", r"\text{one solution}"],
    ),
  ],
  "equations": [
    ("x=5", ["5", "x = 5", "5 = x"], ["x=6", "-5"]),
    ("y=2x+3", ["y = 3+2x", "2x+3=y", "y-2x=3"], ["y=2x-3", "y=3x+2"]),
    ("x^2+y^2=25", ["y^2+x^2=25", "25=x^2+y^2"], ["x^2-y^2=25", "x^2+y^2=5"]),
    ("x \\geq 4", [r"x \ge 4", r"4 \leq x"], ["x > 4", r"x \leq 4"]),
  ],
  "pi, e, logarithms, trigonometry": [
    (r"\frac{\pi}{6}", [r"\pi/6", r"\frac{1}{6}\pi"], [r"\frac{\pi}{3}", "0.5", r"30\pi"]),
    (r"e^2-1", [r"-1+e^2", r"e^{2}-1"], ["e^2+1", "e-1"]),
    (r"\log_2 3", [r"\log_{2} 3", r"\frac{\ln 3}{\ln 2}"], [r"\log_3 2"]),
    (
      r"\frac{\sqrt{3}}{2}",
      [r"\sin 60^\circ", r"\sin\frac{\pi}{3}"],
      [r"\cos\frac{\pi}{3}"],
    ),
  ],
  "complex numbers": [
    ("3-4i", ["-4i+3", "3 - 4i"], ["3+4i", "4-3i"]),
    (
      r"\frac{1+i}{2}",
      [r"\frac12+\frac12 i", r"\frac{1}{2}+\frac{i}{2}"],
      [r"\frac{1-i}{2}"],
    ),
    ("2i", [r"2\cdot i", r"0+2i"], ["2", "-2i"]),
  ],
  "large, binomial, other bases": [
    (r"\binom{10}{3}", ["120", r"\dbinom{10}{3}"], ["720", r"\binom{10}{4}"]),
    (r"7!", ["5040"], ["504", "7"]),
    (r"1011_2", ["1011_{2}", r"1011_2"], ["1011_3", "1010_2"]),
    (
      r"1.2\times 10^{6}",
      ["1200000", r"12\cdot 10^5", "1,200,000"],
      [r"1.2\times 10^5", "120000"],
    ),
    (r"\infty", [r"+\infty"], [r"-\infty", "0"]),
  ],
}
