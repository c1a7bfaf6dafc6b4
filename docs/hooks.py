"""What Sphinx is told about our docstrings and formulas."""

from docutils.nodes import SkipNode
from docutils.utils.math import latex2mathml


def escape_bars(app, what, name, obj, options, lines):
    """Norms are written |x| in docstrings; to Sphinx that would be a substitution."""
    in_example = False
    for k, line in enumerate(lines):
        in_example = line.lstrip().startswith(">>>") or (in_example and bool(line.strip()))
        if not in_example and "``" not in line:
            lines[k] = line.replace("|", r"\|")


def skip_fields(app, what, name, obj, skip, options):
    """The fields of named tuples are told in the docstring of their class."""
    return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")


# Formulas as MathML, which browsers draw themselves: nothing is fetched, so that the pages can be read without a network.
# docutils reads a subset of LaTeX: write \tfrac{1}{2}, not \tfrac12, and \hat g{}_y, not \hat g_y.


def mathml(node, as_block):
    """A formula; bars are brackets, not relations with space around them."""
    code = latex2mathml.tex2mathml(node.astext(), as_block=as_block)
    return code.replace('<mo stretchy="false">|</mo>', '<mo stretchy="false" lspace="0" rspace="0">|</mo>')


def inline(translator, node):
    translator.body.append(mathml(node, as_block=False))
    raise SkipNode


def block(translator, node):
    translator.body.append(f'<div class="formula">{mathml(node, as_block=True)}</div>')
    raise SkipNode


def setup(app):
    app.connect("autodoc-process-docstring", escape_bars, priority=900)
    app.connect("autodoc-skip-member", skip_fields)
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
