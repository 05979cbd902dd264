"""Send the test part of a set to a running service, and print the quality of its models as a table.

The models are those whose names begin as `train_TASK.py` names the models of the set. Streams of the tasks language, keyword and forecast
go through sessions, chunk by chunk.
"""

from __future__ import annotations

import argparse
import sys
import time

import train_forecast
import train_keyword
import train_language
import train_series
import train_spans
import train_tags
import train_text
from training import service, terminal
from training.parts import MissingData
from training.recipe import Recipe, Record, add_data_flags, append
from training.service import Service

RECIPES: dict[str, Recipe] = {
    recipe.task: recipe
    for recipe in (
        train_text.TextRecipe(),
        train_tags.TagsRecipe(),
        train_spans.SpansRecipe(),
        train_language.LanguageRecipe(),
        train_keyword.KeywordRecipe(),
        train_series.SeriesRecipe(),
        train_forecast.ForecastRecipe(),
        train_forecast.ExpectedRecipe(),
    )
}


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    tasks = parser.add_subparsers(dest="task", required=True, metavar=f"{{{','.join(RECIPES)}}}")
    for task, recipe in RECIPES.items():
        command = tasks.add_parser(
            task, help=f"models of train_{task}.py" if task != "expected" else "models of train_forecast.py --expected"
        )
        add_data_flags(command, recipe)
        command.add_argument("--model", action="append", help="name of a model (default: every model of the set)")
        command.add_argument("--limit", type=int, help="number of examples (default: the whole test part)")
        service.add_flags(command)
    return parser.parse_args(line)


def evaluate(recipe: Recipe, flags: argparse.Namespace, examples: list[object]) -> list[Record]:
    """Return a record for each model."""
    server, measured = Service(flags.url, flags.key_file, flags.ca), []
    prefix = f"{recipe.prefix(flags.set)}-"
    for model in flags.model or [name for name in server.models() if name.startswith(prefix)]:
        start = time.monotonic()
        with terminal.bar(model, len(examples)) as progress:
            answers = recipe.ask(server, model, examples, progress)
        measured.append(
            {
                "kind": "served",
                "task": recipe.task,
                "set": flags.set,
                "model": model,
                "quality": recipe.quality(examples, answers),
                "examples": len(examples),
                "seconds": round(time.monotonic() - start, 1),
            }
        )
    return measured


def main(line: list[str] | None = None) -> int:
    """Return 0 if the table was printed, 1 if the service does not answer or has no such model, 2 if the examples are missing."""
    flags = arguments(line)
    recipe = RECIPES[flags.task]
    try:
        examples = recipe.read_test(flags.data, flags.set)[: flags.limit]
    except MissingData as error:
        print(error, file=sys.stderr)
        return 2
    try:
        measured = evaluate(recipe, flags, examples)
    except OSError as error:
        print(service.problem(flags, error), file=sys.stderr)
        return 1
    if not measured:
        print(f"{flags.url} has no model named {recipe.prefix(flags.set)}-...: name one with --model", file=sys.stderr)
        return 1
    rows = [[each["model"], *map(terminal.number, each["quality"].values()), f"{each['seconds']:.1f}"] for each in measured]
    figures = map(terminal.heading, measured[0]["quality"])
    terminal.table([f"model, {len(examples)} examples", *figures, "seconds"], rows)
    append(flags.results, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
