"""Bad configs: every key with values that it can't have, texts that are no config, keys that contradict each other."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from trainfleet.cli import main
from trainfleet.config import Settings
from trainfleet.config.schema import Schema, is_group, load_schema, walk
from trainfleet.config.yaml_lines import dotted
from trainfleet.launch.command import config_of

from .cases import Case

NOT_FINITE = (".nan", ".inf", "-.inf", ".NaN", "+.INF", "1e400", "-1e999", "!!float .nan")
TINY = ("5e-324", "-1e-320", "1e-39", "1e-400", "0.0001e-999")  # 32 bits make 0 of them
NO_NUMBER = (
    "abc",
    "'4'",
    "0x10",
    "0b11",
    "1_000",
    "1:30:00",
    "2024-01-01",
    "12 %",
    "1,000",
    "٤",
    "1e",
    "--1",
    "4GB",
    "٣.٥",
    "½",
)
ODD_NUMBERS = (
    "9" * 5000,
    "-" + "9" * 40,
    str(2**63),
    str(-(2**63) - 1),
    "1e300",
    "-1e300",
    "010",
    "-007",
    "!!int '0o17'",
)
NO_SCALAR = ("[]", "[[]]", "{}", "{a: b}", "[1]", "{1: 2}")
TAGGED = ("!!python/object/apply:os.system ['true']", "!!python/name:os.system x", "!!binary aGk=", "!!set {a}", "!!omap [a: 1]",
          "!!timestamp 2001-01-01", "!mine x", "!!int x", "!!float x", "!!bool x", "!!map x", "!!seq x", "!!str [a]")  # fmt: skip
UNPRINTABLE = ('"a\\0b"', '"\\e[31mred"', '"a\\nb"', '"a\\r"', '"a\\tb"', '"\\x7f"', '"\\u202eabc"', '"a\\u2028b"', '"\\ud800"',
               '"\\x85"', "|\n            a\n", ">-\n            a\n\n            b\n")  # fmt: skip
FREE = {"data.text_field", "data.tokenizer", "fleet.ssh.key", "fleet.ssh.known_hosts", "fleet.ssh.config", "train.init_from",
        "checkpoint.path"}  # fmt: skip


def config(text: str | bytes, set: str = "", **short: tuple[str, str]) -> Callable[[Path], object]:
    """A run that loads a config of this text."""

    def run(folder: Path) -> object:
        path = folder / "config.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        return config_of(Settings(path, set, short))

    return run


def written(key: tuple[str, ...], value: str) -> str:
    """A config in block style that has `value` at a key."""
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(key)]
    lines[-1] += f" {value}"
    return ("" if key == ("name",) else "name: a\n") + "\n".join(lines) + "\n"


def values() -> Iterator[Case]:
    """Each key with each value that its type and range forbid."""
    for key, part in walk(load_schema()):
        if is_group(part):
            nothing = () if "null" in part["type"] else ("null",)
            wrong: tuple[str, ...] = ("3", "x", "[a]", "true", ".nan", *nothing, *TAGGED[:3])
        else:
            wrong = (
                *NOT_FINITE,
                *TINY,
                *TAGGED[:8],
                *UNPRINTABLE,
                *_mistyped(part),
                *_out_of_range(part),
            )
        for value in wrong:
            yield Case(
                "value",
                f"{dotted(key)}: {value[:40]!r}",
                config(written(key, value)),
                key=dotted(key),
            )


def _mistyped(part: Schema) -> Iterator[str]:
    types = part["type"] if isinstance(part["type"], list) else [part["type"]]
    if "array" in types:
        yield from (
            "3",
            "x",
            "{a: b}",
            "[.nan]",
            "[[a]]",
            "[null]",
            "[3]",
            '["a\\0"]',
            "[true]",
            "[2024]",
            "null",
            "['']",
        )
        return
    yield from NO_SCALAR
    if "boolean" not in types:
        yield from ("true", "false")
    if "null" not in types:
        yield from ("null", "~", "")
    if "string" in types:
        if not {"integer", "number"} & set(types):
            yield from ("4", "1.5", "-0", "1e3")
        if "pattern" in part or "enum" in part:
            yield from ("'a/../b:c'", "'../../x'", "' '", "''")
    else:
        yield from NO_NUMBER
        yield from ODD_NUMBERS


def _out_of_range(part: Schema) -> Iterator[str]:
    for name, beyond in (
        ("minimum", -1),
        ("exclusiveMinimum", 0),
        ("maximum", 1),
        ("exclusiveMaximum", 0),
    ):
        if name in part:
            yield str(part[name] + beyond)
    if "integer" in part["type"] and "number" not in part["type"]:
        yield from ("1.5", "-3", "1e-3")
    if "string" in part["type"] and ("maxLength" in part or "pattern" in part):
        yield "'" + "x" * 5000 + "'"


def texts() -> Iterator[Case]:
    """Texts that are no config, however they are written."""
    good = "name: a\ntrain:\n  steps: 5\n"
    encoded = {
        name: good.encode(name)
        for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp037", "utf-7")
    }
    encoded |= {
        "latin-1": "name: é\n".encode("latin-1"),
        "cp1252": "name: “a”\n".encode("cp1252"),
        "shift-jis": "name: ア\n".encode("shift-jis"),
    }
    del encoded["utf-7"]
    whole: dict[str, str | bytes] = {
        **encoded, "NUL": "name: a\0\n", "escape": "name: \x1b[31ma\n", "bell": "name: a\a\n", "DEL": "name: a\x7f\n",
        "half": b"name: \xed\xa0\x80\n", "overlong": b"name: \xc0\xaf\n", "cut": b"name: \xe2\x82", "empty": "", "blank": " \n\n",
        "comment": "# x\n", "number": "4\n", "word": "name\n", "list": "- name: a\n", "null": "~\n", "two": "name: a\n---\nname: b\n",
        "three": "---\nname: a\n...\n---\n...\n", "tab": "name: a\ntrain:\n\tsteps: 5\n", "indent": "name: a\n  train:\n    steps: 5\n",
        "unclosed list": "name: [a\n", "unclosed map": "name: {a: b\n", "unclosed text": "name: 'a\n", "merge": "a: &a {steps: 5}\nname: a\ntrain:\n  <<: *a\n",
        "no anchor": "name: *a\n", "itself": "name: &a [*a]\n", "itself in a map": "&a\nname: a\ntrain: *a\n",
        "directive": "%YAML 9.9\n---\nname: a\n%x\n", "tag handle": "%TAG ! tag:x,2000:\n---\nname: !y a\n", "reserved": "name: @a\n", "backtick": "name: `a`\n",
        "JSON with a comma": '{"name": "a",, }', "INI": "[train]\nsteps = 5\n", "TOML": 'name = "a"\n', "XML": "<name>a</name>\n",
        "template": "name: {{ run }}\n", "template of blocks": "{% for x in y %}\nname: a\n", "conflict": "<<<<<<< HEAD\nname: a\n=======\nname: b\n>>>>>>> x\n",
        "LFS": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "page": "<!DOCTYPE html><p>404</p>\n", "UTF-32": "name: a\n".encode("utf-32"), "no blank": "name: a\ntrain:\n  steps:5\n",
        "laughs": laughs(9, 9), "laughs in a map": laughs(9, 9).replace("[", "{x: [").replace("]", "]}"), "deep list": "name: " + "[" * 1000 + "]" * 1000,
        "deep map": "name: " + "{a: " * 1000 + "1" + "}" * 1000, "deeper": "name: " + "[" * 100_000, "deep block": "".join(f"{' ' * i}a:\n" for i in range(300)),
        "deep dashes": "name: a\nx: " + "- " * 5000 + "a\n", "questions": "? " * 3000 + "a\n", "large": "name: a\n# " + "x" * 10_000_000, "many keys": "name: a\n" + "".join(f"k{i}: 1\n" for i in range(25_000)),
        "long list": "name: a\ndata: {sources: [" + "a, " * 30_000 + "]}\n", "long word": "name: " + "a" * 200_000, "long key": "name: a\n" + "k" * 5000 + ": 1\n",
        "many anchors": "name: a\n" + "".join(f"k{i}: &a{i} x\n" for i in range(5000)), "many documents": "---\n" * 20_000, "colons": "name: a" + ":" * 100_000,
        "exclamation": "name: " + "!" * 50_000, "quotes": "name: " + "'" * 99_999, "ampersands": "name: " + "& " * 9_999, "percent": "%" * 90_000, "newlines": "\n" * 250_000,
    }  # fmt: skip
    for label, text in whole.items():
        yield Case("text", label, config(text))


def laughs(levels: int, width: int) -> str:
    """A text of some hundred bytes that means width to the power of levels words."""
    lines = ["name: a", "a0: &a0 [" + ", ".join(["x"] * width) + "]"]
    lines += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * width) + "]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


def duplicates() -> Iterator[Case]:
    """Every key twice, wherever it stands; the same as a JSON key; and keys that are no words."""
    for key, part in walk(load_schema()):
        value = "{}" if is_group(part) else "1"
        text = written(key, value) + f"{'  ' * (len(key) - 1)}{key[-1]}: {value}\n"
        yield Case("twice", dotted(key), config(text), key=dotted(key))
        flow = f"{{{key[-1]}: {value}, {key[-1]!r}: {value}}}"
        yield Case(
            "twice in flow style",
            dotted(key),
            config(written(key[:-1], flow) if key[:-1] else flow),
            key=dotted(key),
        )
    odd = ("4", "null", "true", "1.5", "[a]", "{a: b}", "''", "' '", "'a b'", '"\\0"', '"\\e[1m"', "<<", "naмe", "tràin", "name ​", "2024-01-01",
           "!!int x", "'train.steps'", "? [a]\n", '"\\u202e"', "-", "..", "__proto__", "__class__", "constructor", "$ref")  # fmt: skip
    for group in ((), ("train",), ("fleet", "ssh"), ("data",), ("train", "parallelism")):
        for name in odd:
            text = written((*group, "x"), "1").replace("x: 1", f"{name}: 1")
            yield Case(
                "odd key",
                f"{dotted(group)}: {name!r}",
                config(text if group else f"name: a\n{name}: 1\n"),
            )


def contradictions() -> Iterator[Case]:
    """Values that are right one by one and make no sense together, or mean no thing that can be."""
    for text, key in CONTRADICTIONS:
        yield Case("together", text[:90], config(f"name: a\n{text}\n"), key=key)


def _hosts(*words: str) -> list[tuple[str, str]]:
    return [
        (
            f"fleet: {{backend: ssh, shared_folder: /fsx/t, nodes: 1, hosts: [{word}]}}",
            "fleet.hosts",
        )
        for word in words
    ]


SSH = "backend: ssh, shared_folder: /fsx/t, nodes: 1"
PATHS = ("/fsx/../../etc", "/../x", "/", "//", "fsx", "./fsx", "../fsx", "~/fsx", "/fsx x", '"/fsx\\nHOME=/root\\nx"', "'/fsx;id'", "'/fsx$(id)'",
         "'/fsx`id`'", "/fsx/..", "/fsx/./x", "'/fsx#x'", "'/fsx|x'", "'/fsx&x'", "\"/fsx'x\"", "'/fsx\"x'", "'/fsx*'", "'/fsx\\x'", "s3://b/x")  # fmt: skip
BUCKETS = ("s3://", "s3:///x", "s3://A/x", "s3://ab", "s3://a_b/x", "s3://-ab/x", "s3://ab-/x", "s3://a..b/x", "s3://192.168.0.1/x", "s3://" + "a" * 64 + "/x",
           "S3://bucket/x", "s3:/bucket/x", "gs://bucket/x", "http://bucket/x", "file:///x", "s3://xn--abc/x", "s3://bücket/x", "s3://bucket//x", "'s3://buc ket/x'")  # fmt: skip
CONTRADICTIONS: list[tuple[str, str]] = [
    (f"fleet: {{{SSH}, instance_type: p5.48xlarge, ranks_per_node: 16}}", "fleet.ranks_per_node"), (f"fleet: {{{SSH}, instance_type: p5.48xlarge, platform: neuron}}", "fleet.platform"),
    (f"fleet: {{{SSH}, instance_type: trn1.32xlarge, platform: cuda}}", "fleet.platform"), (f"fleet: {{{SSH}, instance_type: c5n.18xlarge, platform: cuda}}", "fleet.platform"),
    ("model: {heads: 7}", "model.heads"), ("model: {heads: 5, kv_heads: 3, hidden_size: 320}", "model.kv_heads"), ("model: {hidden_size: 100, heads: 4, kv_heads: 4}", "model"),
    ("model: {kv_heads: 8}", "model.kv_heads"), ("model: {family: bert, kv_heads: 1}", "model"), ("model: {preset: llama-2-7b, family: bert}", "model.family"), ("model: {preset: gpt2, family: llama}", "model.family"), ("model: {preset: bert-base, family: roberta}", "model.family"),
    ("train: {learning_rate: 1e-20}", "train.learning_rate"), ("train: {epsilon: 1e-36}", "train.epsilon"), ("budget: {max_usd: 1e-9}", "budget.max_usd"), ("data: {validation_fraction: 1e-12}", "data.validation_fraction"),
    ("data: {sources: [{path: a, weight: 1e-30}]}", "data.sources"), ("model: {norm_eps: 1e-30}", "model.norm_eps"), ("train: {schedule_power: 1e-9}", "train.schedule_power"),
    ("model: {family: gpt2, rope_scaling: 2}", "model.rope_scaling"),
    ("model: {family: llama, dropout: 0.5}", "model.dropout"), ("model: {preset: null}", "model"), ("model: {preset: none}", "model.preset"), ("model: {preset: ./none}", "model.preset"),
    ("model: {vocab_size: 10}", "model.vocab_size"), ("model: {max_position_embeddings: 8}", "train.sequence_length"),
    ("train: {sequence_length: 5000}", "train.sequence_length"), ("train: {global_batch_size: 7}", "train.global_batch_size"), ("train: {micro_batch_size: 3}", "train.micro_batch_size"),
    ("train: {micro_batch_size: 64}", "train.micro_batch_size"), ("train: {steps: 10, schedule_steps: 5}", "train.schedule_steps"), ("train: {steps: 10, warmup_steps: 11}", "train.warmup_steps"),
    ("train: {steps: 10, schedule: wsd, decay_steps: 20}", "train.decay_steps"), ("train: {profile_steps: 6-4}", "train.profile_steps"), ("train: {profile_steps: 900-901}", "train.profile_steps"),
    ("train: {parallelism: {tensor: 3}}", "train.parallelism"), ("train: {parallelism: {tensor: 2, pipeline: 2}}", "train.parallelism"), ("train: {parallelism: {fsdp: 3}}", "train.parallelism"),
    ("train: {parallelism: {context: 512}}", "train.parallelism"), ("train: {parallelism: {virtual_stages: 2}}", "train.parallelism"), ("train: {parallelism: {zero_stage: 2}}", "train.parallelism.zero_stage"),
    ("train: {parallelism: none}", "train.parallelism"), ("train: {activation_memory_budget: 0.5, compile: false}", "train.activation_memory_budget"), ("train: {activation_checkpointing: some}", "train.activation_checkpointing"), ("train: {activation_memory_budget: 1.5}", "train.activation_memory_budget"),
    ("train: {param_dtype: bf16, precision: fp32}", "train.param_dtype"), ("train: {param_dtype: bf16, precision: fp16}", "train.param_dtype"), ("train: {param_dtype: fp16}", "train.param_dtype"), ("train: {param_dtype: bf16, precision: bf16, optimizer: muon}", "train.param_dtype"), ("train: {document_mask: true, parallelism: {context: 2}}", "train.document_mask"),
    ("train: {init_from: runs/none}", "train.init_from"), ("train: {init_from: 's3:///x'}", "train.init_from"), ("train: {init_from: ''}", "train.init_from"), ("train: {init_from: 'gs://x/y'}", "train.init_from"),
    ("train: {init_from: " + "x" * 300 + "}", "train.init_from"), ("data: {tokenizer: " + "x" * 300 + "}", "data.tokenizer"), ("model: {preset: ./" + "x" * 300 + "}", "model.preset"),
    ("fleet: {nodes: 65}", "fleet.nodes"), ("fleet: {min_nodes: 3}", "fleet.min_nodes"), ("fleet: {backend: ssh}", "fleet.shared_folder"), ("fleet: {instance_type: p5.48xlarge}", "fleet.instance_type"),
    (f"fleet: {{{SSH}, instance_type: p9.99xlarge}}", "fleet.instance_type"), ("fleet: {backend: ssh, shared_folder: /fsx/t, hosts: [a], nodes: 2}", "fleet.nodes"),
    (f"fleet: {{{SSH}, fsx: {{dns_name: fs-1.example}}}}", "fleet.fsx"), (f"fleet: {{{SSH}, fsx: {{dns_name: fs-1.example, mount_name: x, mount_point: /data}}}}", "fleet.shared_folder"),
    ("checkpoint: {every: 0 min}", "checkpoint.every"), ("checkpoint: {every: 15 hours}", "checkpoint.every"), ("checkpoint: {every: 1e9 min}", "checkpoint.every"), ("checkpoint: {every: sometimes}", "checkpoint.every"),
    ("checkpoint: {path: ../../etc}", "checkpoint.path"), ("data: {name: ../../other}", "data.name"), ("data: {name: A}", "data.name"), ("data: {tokenizer: none.json}", "data.tokenizer"),
    ("data: {sources: [{path: a, weight: 1}, {path: b}]}", "data.sources"), ("data: {sources: [{weight: 1}]}", "data.sources"), ("data: {sources: [{path: a, wieght: 1}]}", "data.sources"),
    ("data: {sources: [{path: a, weight: .inf}]}", "data.sources"), ("data: {sources: [{path: a, weight: -1}]}", "data.sources"), ("data: {sources: [{path: a, weight: 0}]}", "data.sources"),
    *[(f"data: {{sources: [{word}]}}", "data.sources") for word in ("/", "//", "'/*'", "'/**'", "'/**/*.txt'", "/proc", "/sys/x", "'../../../../../../../../../../**'", "hf://", "'hf://:train'", "'hf://a/b/c/d'", "'hf://a/b:train[:10%]'", "'hf://a b'")],
    *[(f"data: {{sources: [{word}]}}", "data.sources") for word in BUCKETS if not word.startswith("s3:/b")],
    *[(f"data: {{tokenized_path: {word}}}", "data.tokenized_path") for word in BUCKETS], *[(f"checkpoint: {{path: {word}}}", "checkpoint.path") for word in BUCKETS],
    *[(f"fleet: {{backend: ssh, nodes: 1, shared_folder: {word}}}", "fleet.shared_folder") for word in PATHS], *[(f"fleet: {{{SSH}, python: {word}}}", "fleet.python") for word in PATHS],
    *[(f"fleet: {{{SSH}, fsx: {{mount_point: {word}}}}}", "fleet.fsx.mount_point") for word in PATHS],
    *_hosts("'gpu-[08-01]'", "'gpu-[0-99999999]'", "'gpu-[0-999][0-999]'", "'gpu-[0-99999999999999999999]'", "'a:0'", "'a:99999'", "'a:65536'", "'a:-1'", "'a:x'", "'a:'", "''", "' '", "'a b'", "'a,b'", "a, a", "a, A",
            "'x=a', 'x=b'", "a, 'a:22'", "'-oProxyCommand=id'", "'x@-o'", "'@a'", "'a@'", "'a@b@c'", "'=a'", "'a='", "'::1'", "'[::1'", "'[zz::1]'", "'[:::]'", "'[1:2]:22'", "999.1.1.1", "1.2.3", "'1.2.3.4.5'", "'a..b'", "'.a'",
            "'a-'", "'" + "a" * 64 + "'", "'" + "a." * 130 + "'", "'gpu-[a-b]'", "'gpu-[1-'", "'gpu-[]'", "'gpu-{1,2}'", "'gpu-*'", "'gpü'", "'a/b'", "'a;id'", "'$(id)'", "'a\\b'", "'gpu-[٠-٩]'", "'a:٢٢'", "s3://a", "'http://a'", "'root:pw@a'"),
    *[(f"fleet: {{{SSH}, ssh: {{user: {word}}}}}", "fleet.ssh.user") for word in ("''", "' '", "'a b'", "-l", "'a;id'", "'$(id)'", "'a@b'", "'é'", "'1a'", "'" + "a" * 99 + "'", "root/x", "'a:b'")],
    *[(f"fleet: {{{SSH}, ssh: {{jump: {word}}}}}", "fleet.ssh.jump") for word in ("''", "' '", "'a b'", "'-oX=y'", "'a:0'", "'a:70000'", "'a,b'", "'u@'", "'@h'", "'a:b:c'", "'ssh://a'")],
    *[(f"fleet: {{{SSH}, ssh: {{fingerprints: [{word}]}}}}", "fleet.ssh.fingerprints") for word in ("x", "'SHA256:x'", "'MD5:00:11'", "'SHA256:" + "a" * 44 + "'", "''", "'sha256:" + "a" * 43 + "'", '"SHA256:' + "a" * 43 + '\\n"')],
    *[(f"fleet: {{secrets: [{word}]}}", "fleet.secrets") for word in ("''", "'A B'", "1A", "A-B", "'A=b'", "É", '"A\\n"', "'" + "A" * 200 + "'", "'$A'")],
    *[(f"fleet: {{rendezvous_port: {word}}}", "fleet.rendezvous_port") for word in ("0", "80", "1023", "65536", "99999", "-1", "'29500'")],
]  # fmt: skip


def sources() -> Iterator[Case]:
    """data.sources that hold no text, or are no files: `make plan` says so."""
    for word in SOURCES:
        yield Case("source", word[:60], _planned(word), refused=False)


SOURCES = ("none", "none/", "'*.none'", "'['", "'[a'", "'**/**'", "pipe.txt", "d", "loop", "x.zip", "'~'", "e.txt", "'{a,b}'", "'d/*'", "bad.jsonl", "bad.parquet", "bad.zst", "'d/[!x]*'", "latin.txt", "'/dev/zero'", "'/dev/stdin'",
           "'" + "x" * 300 + ".txt'", "'" + "y/" * 2000 + "z.txt'", "stdlib:x", "'stdlib:'", "up/../d", "'e.txt/x'")  # fmt: skip


def _planned(word: str) -> Callable[[Path], object]:
    def run(folder: Path) -> None:
        os.mkfifo(folder / "pipe.txt")
        (folder / "d").mkdir()
        os.mkfifo(folder / "d" / "p.txt")
        (folder / "d" / "l.txt").symlink_to("/dev/zero")
        (folder / "loop").symlink_to("loop")
        for name, content in (
            ("x.zip", b"x"),
            ("e.txt", b""),
            ("bad.jsonl", b"{\n"),
            ("bad.parquet", b"x" * 50),
            ("bad.zst", b"x" * 50),
            ("latin.txt", b"\xe9" * 50),
        ):
            (folder / name).write_bytes(content)
        (folder / "config.yaml").write_text(f"name: a\ndata: {{name: t, sources: [{word}]}}\n")
        main(["plan", "CONFIG=config.yaml"])

    return run


def drawn(seed: int, count: int) -> Iterator[Case]:
    """Good configs with some bytes changed, cut, doubled or swapped: most are bad, none may crash."""
    draw = random.Random(seed)
    recipes = [
        path.read_bytes()
        for path in sorted(
            (Path(__file__).parents[2] / "python" / "trainfleet" / "recipes").glob("*.yaml")
        )
    ]
    scraps = [
        b"\0",
        b"\t",
        b"\xff",
        b"&a ",
        b"*a",
        b"!!",
        b"[",
        b"}",
        b"'",
        b'"',
        b"|\n",
        b": ",
        b"- ",
        b"---\n",
        b"\xef\xbb\xbf",
        b".nan",
        b"1e999",
        b"?",
        b"%",
        b"<<: ",
        b"#",
    ]
    for number in range(count):
        text = bytearray(draw.choice(recipes))
        for _ in range(draw.randint(1, 6)):
            at, size = draw.randrange(len(text) + 1), draw.randint(1, 40)
            match draw.randrange(5):
                case 0:
                    text[at:at] = draw.choice(scraps)
                case 1:
                    del text[at : at + size]
                case 2:
                    text[at:at] = text[at : at + size]
                case 3:
                    text[at : at + 1] = bytes([draw.randrange(256)])
                case _:
                    text[at:at] = bytes(
                        draw.choices(b"[]{}:,&*!|>'\"%@`#-?\n\t 0123456789.eE", k=size)
                    )
        yield Case("drawn", f"seed {seed}, {number}", config(bytes(text)), refused=False)
