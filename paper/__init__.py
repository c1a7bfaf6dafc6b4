"""The paper's tables and figures, made again: configs, a runner, and a page that puts both side by side."""
