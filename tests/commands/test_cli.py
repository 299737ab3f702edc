"""The console script `jaxpaged`."""

import pytest

from jaxpaged.commands.cli import main


@pytest.mark.parametrize("command", ["serve", "plan", "compile", "convert", "models"])
def test_each_command_is_listed_and_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and f"\n{command} " in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith(f"usage: jaxpaged {command} ")


def test_the_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("typed", "hint"), [("sevre", "did you mean `jaxpaged serve`?"), ("xyz", "convert, models")])
def test_an_unknown_command_is_one_line(typed: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed]) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1
