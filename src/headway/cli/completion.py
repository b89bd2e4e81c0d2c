"""``completion``: print the script with which a shell completes commands, options, job ids and causes."""

from __future__ import annotations

import os

import click
from click.shell_completion import CompletionItem, ShellComplete, add_completion_class, get_completion_class

from headway.cli import headway
from headway.cli.toolkit import put

VARIABLE = "_HEADWAY_COMPLETE"
SHELLS = ("bash", "zsh", "fish", "powershell")


@add_completion_class
class PowerShellComplete(ShellComplete):
    """Completion for PowerShell. It passes the words so far and reads one ``value<TAB>help`` per line."""

    name = "powershell"
    source_template = """\
Register-ArgumentCompleter -Native -CommandName %(prog_name)s -ScriptBlock {
    param($wordToComplete, $commandAst, $cursorPosition)
    $env:%(complete_var)s = "powershell_complete"
    $env:COMP_WORDS = ($commandAst.CommandElements | ForEach-Object { $_.ToString() }) -join "`n"
    $env:COMP_WORD = $wordToComplete
    try {
        %(prog_name)s | ForEach-Object {
            $value, $help = $_ -split "`t", 2
            if (-not $help) { $help = $value }
            [System.Management.Automation.CompletionResult]::new($value, $value, 'ParameterValue', $help)
        }
    } finally {
        Remove-Item Env:%(complete_var)s, Env:COMP_WORDS, Env:COMP_WORD
    }
}
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        words = os.environ.get("COMP_WORDS", "").split("\n")
        incomplete = os.environ.get("COMP_WORD", "")
        typed = [word for word in words[1:] if word]
        if incomplete and typed and typed[-1] == incomplete:
            typed.pop()
        return typed, incomplete

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.value}\t{item.help}" if item.help else str(item.value)


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash        eval "$(headway completion bash)"        in ~/.bashrc
    zsh         eval "$(headway completion zsh)"         in ~/.zshrc
    fish        headway completion fish > ~/.config/fish/completions/headway.fish
    powershell  headway completion powershell | Out-String | Invoke-Expression   in $PROFILE
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.BadParameter(f"click knows no completion for {shell}.")
    put(kind(headway, {}, "headway", VARIABLE).source())
