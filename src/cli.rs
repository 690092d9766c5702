//! Commands and flags, declared once. Commands that agents also call as tools are also deserialized from JSON and
//! publish a schema ([`crate::mcp`]): the help text of a flag is its description in the schema.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use schemars::JsonSchema;
use search::Budget;
use search::strategy::StrategyName;
use serde::Deserialize;

use crate::config_source::ConfigSource;

mod config;
mod fleet;
mod gpu;
mod help;
mod inspect;
mod load;
pub(crate) mod renamed;
mod runs;
mod text;
mod trace;

pub(crate) use self::fleet::*;
pub(crate) use self::trace::*;
pub(crate) use config::*;
pub(crate) use gpu::*;
pub(crate) use help::command;
pub(crate) use inspect::*;
pub(crate) use load::LoadArgs;
pub(crate) use runs::*;
pub(crate) use text::*;

/// What `amk` prints when it is run without arguments.
pub(crate) const FIRST_STEPS: &str = "\
amk turns a decoder LLM into one persistent CUDA megakernel and searches for its
fastest schedule.

  amk doctor                     what this machine can do
  amk chat -m Qwen/Qwen3-0.6B    downloads a model, and chats
  amk serve -m DIR               an OpenAI-compatible server and a page for chats
  amk loop --budget 64           search on a preset model; no GPU or download needed
  amk propose -m toy             the schedule to edit, every knob's legal values
  amk evaluate -m toy --config my.json
                                 check and judge a schedule of your own

`amk --help` lists all commands, `amk COMMAND --help` has examples. Exit codes:
0 yes, 1 a gate said no, 2 usage or unreadable input, 3 capability missing,
4 integrity, 5 inconclusive, 70 a bug in amk, 130 interrupted.";

pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0    yes
  1    a gate said no: rejected, disagreed, trapped
  2    wrong usage, or input that cannot be read
  3    capability missing: no GPU, no NVRTC
  4    integrity: tampered or corrupt
  5    inconclusive
  70   a bug in amk
  130  interrupted

Environment:
  AMK_NVRTC       folder of libnvrtc.so.13
  AMK_CACHE       compiled kernels; default: ~/.cache/amk
  AMK_DATA        schedules found here; default: ~/.local/share/amk
  AMK_API_KEY     the API key of `amk serve`, or of the server of `amk bench --serve`
  AMK_KERNEL_DIR  kernel sources to compile instead of those in the binary
  HF_HUB_CACHE    models of the Hugging Face Hub; default: $HF_HOME/hub, ~/.cache/huggingface/hub
  HF_TOKEN        access token for gated and private models; default: the one of `hf auth login`
  HF_HUB_OFFLINE  1: download nothing

Standard output carries one JSON document with a `schema` id (on a terminal only with --json); \
everything for people goes to standard error. `amk COMMAND --help` has examples.";

/// Turns a decoder LLM into one persistent CUDA megakernel and searches for its fastest schedule.
#[derive(Debug, Parser)]
#[command(name = "amk", version = env!("AMK_VERSION"), about, after_help = EXIT_CODES, max_term_width = 110)]
pub(crate) struct Cli {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// Print the answer as JSON on standard output, even on a terminal. Default: only if standard output is no terminal.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Print nothing on standard error except the reason of a failure.
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Log internals on standard error: kernels compiled, programs loaded, launches. Twice: in more detail.
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Says what this machine can do, what is missing and how to get it.
    #[command(
        after_help = "Examples:\n  amk doctor\n  amk doctor --model llama-3.1-8b\n  amk doctor | jq .checks"
    )]
    Doctor(DoctorArgs),
    /// Prints the schedule to start from and the search space: every knob with its legal values.
    #[command(after_help = "Examples:\n  amk propose --model toy\n  \
        amk propose --model llama-3.2-1b --target h100 | jq .search_space\n  \
        amk propose --model smollm2-135m --ledger runs/x/ledger.jsonl   (its incumbent)")]
    Propose(ProposeArgs),
    /// Judges one schedule: validate, lower, verify, compare with the graph, then time or predict.
    #[command(after_help = "Examples:\n  amk evaluate --model toy\n  \
        echo '{\"pipeline\":{\"stages\":4}}' | amk evaluate --model toy --config -\n  \
        amk evaluate --model llama-3.2-1b --config best.json --device cuda\n\n\
        A config gives any subset of the knobs; the others take their defaults.")]
    Evaluate(EvaluateArgs),
    /// Searches: proposes schedules, keeps what is better, reverts what is not.
    #[command(after_help = "Examples:\n  amk loop --budget 64\n  \
        amk loop --budget 10m --model llama-3.2-1b --device cuda --out runs/llama\n  \
        amk loop --resume --out runs/llama\n\n\
        Every finished trial is on the disk (DIR/ledger.jsonl) before the next begins. Ctrl-C ends the search after the current \
        trial with exit code 130; --resume goes on without repeating a finished trial. A trial is a schedule that lowers to a new \
        program or kernel; illegal and repeated proposals cost none.")]
    Loop(LoopArgs),
    /// Searches over many machines or cards: jobs on a board, leased by workers.
    #[command(
        after_help = "Examples:\n  amk fleet submit --board b.sqlite --models toy,toy-2l --device cpu --budget 8\n  \
        amk fleet worker --board b.sqlite --device cpu --until-done\n  amk fleet status --board b.sqlite\n\n\
        Any number of workers may run at once, be killed, and come late: each job has one result. docs/guide/fleet.md says how."
    )]
    Fleet {
        /// The subcommand.
        #[command(subcommand)]
        command: FleetCommand,
    },
    /// What all searches found, in one SQLite file: shows, checks, imports.
    #[command(
        after_help = "Examples:\n  amk corpus show\n  amk corpus import runs\n  amk corpus check\n\n\
        A search adds its trials to store.sqlite beside its folder. docs/reference/store.md describes the tables; sqlite3 and pandas read them. The \
        ledgers are the record: a store can be made anew from them at any time."
    )]
    Corpus {
        /// The subcommand.
        #[command(subcommand)]
        command: CorpusCommand,
    },
    /// Inspects, checks and compares searches on the disk.
    #[command(
        after_help = "Examples:\n  amk runs list\n  amk runs verify runs/0001 | jq '.runs[] | select(.holds | not)'\n\n\
        verify finds rows that were edited, removed, moved or cut off, and figures that do not follow from their samples. Exit code 4: one \
        does not hold; the report names the file, the line and what is wrong."
    )]
    Runs {
        /// The subcommand.
        #[command(subcommand)]
        command: RunsCommand,
    },
    /// Continues a prompt, by greedy decoding or sampling.
    #[command(
        after_help = "Examples:\n  amk generate --model DIR --prompt \"The sky is\" --max-new-tokens 40\n  \
        amk generate --model DIR --prompt \"What is 2 + 2?\" --chat\n  \
        amk generate --model DIR --prompt \"Once\" --temperature 0.8 --top-p 0.95 --seed 7\n  \
        amk generate --model toy --tokens 1,2,3 --device eval --logits logits.safetensors\n\n\
        --device cpu runs the lowered program on the reference VM, eval the graph with no schedule, cuda the megakernel. \
        With cuda the device chooses; with --logprobs or --logits it sends its logits and the host chooses. \
        --tokens continues for exactly --max-new-tokens tokens unless --stop is given; --prompt also stops at the model's end tokens."
    )]
    Generate(GenerateArgs),
    /// Runs the commands of a command log again and compares the answers.
    #[command(
        after_help = "Examples:\n  amk replay commands.jsonl\n  amk replay commands.jsonl --device eval\n\nExit code 1: an answer differs. It names the entry, the session and the position."
    )]
    Replay(ReplayLogArgs),
    /// Chats with a model in the terminal, line by line. The conversation is kept.
    #[command(
        after_help = "Examples:\n  amk chat --model Qwen/Qwen3-0.6B\n  amk chat --model DIR --device cuda --system \"Answer in one sentence.\"\n  \
        echo \"What is 2 + 2?\" | amk chat --model DIR --json\n\n\
        /reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer. The model needs a chat template. Answers are on \
        standard error as they come; standard output gets one document with all messages at the end. Without a GPU the graph runs."
    )]
    Chat(ChatArgs),
    /// Serves a model over HTTP: OpenAI's completions, chat and responses, and Anthropic's messages.
    #[command(
        after_help = "Examples:\n  amk serve --model DIR\n  amk serve --model smollm2-135m --device eval --addr 127.0.0.1:9000\n  \
        AMK_API_KEY=SECRET amk serve --model DIR --served-model-name my-model --cors https://chat.example\n\n\
        Standard output carries one document, with the address, once requests are taken. Ctrl-C lets requests under way finish, at most \
        10 s; a second one breaks them off. --device eval runs the graph, cpu the lowered program on the reference VM, cuda the \
        megakernel. docs/reference/http-api.md has the endpoints and the fields of a request."
    )]
    Serve(ServeArgs),
    /// Shows what a running `amk` is doing: sequences, workers, step times, rates. It does not slow it down.
    #[command(
        after_help = "Examples:\n  amk top\n  amk top --pid 4711\n  amk top --once --json | jq .rates.tokens_per_s\n\n\
        In the terminal: q ends, p pauses. docs/reference/telemetry.md says what the figures mean."
    )]
    Top(TopArgs),
    /// Measures us per token and accuracy, other engines too; or a server. Without a GPU it predicts, and says so.
    #[command(
        after_help = "Examples:\n  amk bench --model llama-3.2-1b --context 128\n  amk bench --model llama-3.2-1b --context 16384 --peers none\n  \
        amk bench --model DIR --peers all --gguf model.gguf\n  amk bench --model smollm2-135m --device cpu\n  \
        amk bench --manifest corpus/bench.json --device cuda --bundle bundles\n  \
        amk bench --serve http://127.0.0.1:8080 --clients 8 --requests 200 --plot load.svg"
    )]
    Bench(BenchArgs),
    /// Checks bundles: files with a schedule and the proof of its measured time. Written by `bench --bundle`; no GPU is needed.
    #[command(
        after_help = "Examples:\n  amk bundle corpus/schedules/h200/*/*.bundle.json\n  amk bundle mine.json --reference\n\n\
        Refuses an edited file (exit code 4), a schedule that is illegal or lowers to another program now, and figures that do not \
        follow from the samples. Small models are run on the reference VM too. A bundle of another kernel build is `stale`: it is \
        shown with the build that it is of, and is no failure without --current."
    )]
    Bundle(BundleArgs),
    /// Walks every number of a page to its evidence: samples, program, kernel, commit, card.
    #[command(
        after_help = "Examples:\n  amk provenance README.md\n  amk provenance | jq '.numbers[] | select(.status != \"holds\")'\n  amk provenance --write\n\n\
        A page names the evidence of a number in a comment; docs/explanation/measuring.md has the forms. Exit code 4: a number or its \
        evidence was altered; the right figure is shown. Exit code 5: the evidence is of another build (stale), or there is none."
    )]
    Provenance(ProvenanceArgs),
    /// Breaks down the time of a step: by op, waiting, input, products and output; or captures what a running amk does.
    #[command(
        after_help = "Examples:\n  amk trace --model llama-3.2-1b --context 128\n  amk trace --model llama-3.2-1b --config a.json --config b.json\n  amk trace --model llama-3.2-1b --device cpu --perfetto step.json --digest step.md\n  \
        amk trace --pid 4711 --seconds 2 --perfetto live.json\n\n\
        With --pid: what a running amk did, by client, turn, command and device. Exit code 3: nothing happened (`empty_trace`)."
    )]
    Trace(TraceArgs),
    /// Measures every point of a grid of schedules: strategies are compared on it without a GPU, and the cost model is fitted to it.
    #[command(
        after_help = "Examples:\n  amk grid record --model smollm2-135m --grid corpus/grids/smollm2-135m.grid.json --device cuda --out smollm2.jsonl"
    )]
    #[command(name = "grid")]
    MeasuredGrid {
        /// The subcommand.
        #[command(subcommand)]
        command: MeasuredGridCommand,
    },
    /// Compares predictions with measured grids: shows the errors, fits the rates.
    #[command(
        after_help = "Examples:\n  amk calibrate corpus/grids/h200-*.jsonl\n  amk calibrate corpus/grids/h200-*.jsonl --fit lower/src/cost/rates.json\n\n\
        Exit code 1: some model is ranked worse than 0.8, or a prediction is below the bound. A fit holds out every fourth row and \
        prints both; the build includes the rates, so build again after it."
    )]
    Calibrate(CalibrateArgs),
    /// Lowers a schedule to a program; prints its ids, or saves it.
    #[command(
        after_help = "Examples:\n  amk lower --model toy --json\n  amk lower --model toy -o toy.amk      (text)\n  \
        amk lower --model toy --config my.json -o toy.amkp      (binary)"
    )]
    Lower(LowerArgs),
    /// Checks a saved program against every rule.
    #[command(
        after_help = "Examples:\n  amk verify toy.amk\n  amk verify toy.amkp | jq .violations"
    )]
    Verify(FileArgs),
    /// Prints a saved program as text.
    #[command(
        after_help = "Examples:\n  amk disasm toy.amkp | less\n  amk disasm toy.amk\n\nPrints text, not JSON."
    )]
    Disasm(FileArgs),
    /// Runs a saved program on the reference VM: compares it with the graph.
    #[command(
        after_help = "Examples:\n  amk lower --model toy -o toy.amkp && amk interpret toy.amkp --model toy\n  \
        amk interpret toy.amk --model toy --tokens 5,6,7"
    )]
    Interpret(InterpretArgs),
    /// Reruns one task of a program: on its original inputs, beside the expected values.
    #[command(after_help = "Examples:\n  amk rerun --model toy --task 0:1 --position 3\n  \
        amk rerun --model toy --program toy.amk --tokens 5,6,7 --position 2 --task 17:0\n\n\
        A verdict names the command for the first task that went wrong (first_divergence.rerun). Exit code 1: a word is wrong. \
        With --device cuda the GPU runs the whole step, and the words are those that the task left in its buffers.")]
    Rerun(RerunArgs),
    /// Writes a model as a Hugging Face folder: other engines can load it.
    #[command(after_help = "Examples:\n  amk export --model smollm2-135m --out smollm2/")]
    Export(ExportArgs),
    /// Quantises a model to fp8, int8 or int4-g128: each weight rounded to nearest, in a folder of compressed-tensors.
    #[command(
        after_help = "Examples:\n  amk quantize --model llama-3.1-8b --format fp8 --out llama-fp8/\n  \
        amk quantize --model DIR --format int8 --lm-head int8 --out int8/\n\n\
        Embedding and lm_head keep their type unless --lm-head is given. Nothing is calibrated: int4-g128 loses accuracy that GPTQ and AWQ keep."
    )]
    Quantize(QuantizeArgs),
    /// Rewrites files of the version before: schedules, grids, runs.
    #[command(
        after_help = "Examples:\n  amk migrate old/best.json --out best.json\n  amk migrate old-runs/0001 --out runs/0001\n\n\
        Only names change; schedules get new ids, and what was rewritten names its origin in `migrated_from`. A ledger that does not hold is refused."
    )]
    Migrate(MigrateArgs),
    /// Lists what can be changed about a schedule: the cause of lost time that each knob should shrink, its legal moves, their
    /// predicted and measured effects.
    #[command(
        after_help = "Examples:\n  amk levers --model llama-3.2-1b\n  amk levers --model llama-3.2-1b --store runs/store.sqlite\n  \
        amk levers --model llama-3.2-1b --device cuda --try pipeline.stages=8\n  \
        amk levers --model llama-3.2-1b --device cuda --check 40 --checks checks.jsonl\n\n\
        On a GPU a prediction has the range in which four of five past ones on this card ended (--check). Exit code 5: fewer than 20 of them."
    )]
    Levers(LeversArgs),
    /// Looks into what was compiled, and into a running `amk`.
    #[command(
        after_help = "Examples:\n  amk inspect kernel --model toy\n  amk inspect ring\n  amk inspect evidence"
    )]
    Inspect {
        /// The subcommand.
        #[command(subcommand)]
        command: InspectCommand,
    },
    /// Runs a program on the GPU under compute-sanitizer: memcheck, synccheck, racecheck.
    #[command(
        after_help = "Examples:\n  amk sanitize --model toy\n  amk sanitize --tool memcheck --out reports --model llama-3.2-1b --config best.json\n  \
        amk sanitize --tool racecheck -- target/release/deps/differential logits_and_tokens\n\n\
        racecheck does not follow every way in which the kernel orders accesses: those are counted by kind, with what orders them, and any other pair is a race. \
        Exit code 1: an error, a race, a tool that did not reach its end, or a program that failed."
    )]
    Sanitize(SanitizeArgs),
    /// Searches decisions, notebooks and ledgers for a question: what was tried, and what came of it. Failures come first.
    #[command(
        after_help = "Examples:\n  amk notes \"does prefetching into L2 help\"\n  amk notes \"attention kv_split at 16384\" --in runs --in docs/lab\n\n\
        Plain ranked text search (BM25). Each note names its file and lines, or its run and trial. Exit code 1: nothing matches."
    )]
    Notes(NotesArgs),
    /// Explains a word: a knob, a rule, a trap, an exit code, a term.
    #[command(
        after_help = "Examples:\n  amk explain                       every name there is\n  amk explain pipeline.stages\n  amk explain R-HAPPENS\n  \
        amk explain counter_deadline\n  amk explain 5                     an exit code\n  amk explain \"flag-in-data word\""
    )]
    Explain(ExplainArgs),
    /// Compares two schedules knob by knob, or two programs task by task.
    #[command(after_help = "Examples:\n  amk diff runs/0001/best.json runs/0002/best.json\n  \
        amk diff a.json b.json --model smollm2-135m      (and what they lower to)\n  amk diff a.amkp b.amkp")]
    Diff(DiffArgs),
    /// Writes searches as one HTML page: progress, what was kept, the bound, each knob's effect, the machine, how to reproduce.
    #[command(
        after_help = "Examples:\n  amk report runs/0001\n  amk report runs --out night.html\n\nThe page has no script and fetches nothing. A ledger that does not hold is shown as such."
    )]
    Report(ReportArgs),
    /// Serves the commands that an agent needs as MCP tools: on standard input and output.
    #[command(
        after_help = "Examples:\n  amk mcp                           (started by an MCP client; HARNESS.md has the registration)\n\n\
        Standard output carries JSON-RPC only. The server ends when standard input does; a search under way ends after its trial."
    )]
    Mcp,
    /// Drives the GPU for a search; started by `amk` itself.
    #[command(hide = true)]
    DeviceChild(DeviceChildArgs),
    /// Renders a chat template; started by `amk` itself.
    #[command(hide = true)]
    TemplateChild,
    /// Prints the manual page, or writes the pages of all commands.
    #[command(
        after_help = "Examples:\n  amk man | man -l -\n  amk man --out ~/.local/share/man/man1\n\nPrints a page, not JSON; with --out a document that names the pages."
    )]
    Man {
        /// The folder for the pages of all commands; created if missing.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Prints a shell's completion script.
    #[command(
        after_help = "Examples:\n  amk completions bash > ~/.local/share/bash-completion/completions/amk\n  \
        amk completions zsh > ~/.zfunc/_amk\n\nPrints a script, not JSON."
    )]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// What runs the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceChoice {
    /// The GPU if there is one, else the CPU.
    #[default]
    Auto,
    /// The reference VM; latencies are predicted.
    Cpu,
    /// The GPU; an error without one.
    Cuda,
    /// The graph with no schedule (`generate` and `serve` only, whose help names it).
    #[value(hide = true)]
    Eval,
}

/// The model and where it runs.
#[derive(Debug, Args, Deserialize, JsonSchema)]
pub(crate) struct ModelArgs {
    /// A Hugging Face folder (config.json, *.safetensors, tokenizer.json), a GGUF file, a model of the Hugging Face Hub (ORG/NAME or
    /// ORG/NAME@REVISION, downloaded into the Hub's cache if it is not there), or a preset with random weights, such as
    /// llama-3.2-1b or, in FP8, llama-3.2-1b-fp8 (an unknown name lists them).
    #[arg(long, short, value_name = "DIR|ORG/NAME|PRESET")]
    pub(crate) model: String,
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) place: PlaceArgs,
}

/// Where a model runs.
#[derive(Clone, Debug, Default, Args, Deserialize, JsonSchema)]
pub(crate) struct PlaceArgs {
    /// The GPU to schedule for: h200, h100, a100, l40s, rtx4090, rtx5090, b200, gh200, h20, sm_90. Default: the live device, else h200.
    #[arg(long, value_name = "GPU")]
    #[schemars(extend("enum" = target_names()))]
    pub(crate) target: Option<String>,
    /// What runs the model: auto (the GPU if there is one, else the CPU), cpu (the reference VM; latencies are predicted) or cuda.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    #[serde(default)]
    #[schemars(with = "Option<String>", extend("enum" = ["auto", "cpu", "cuda"], "type" = "string"))]
    pub(crate) device: DeviceChoice,
    /// Capacity of the key/value cache in tokens. Default: the model's positions, at most 4096.
    #[arg(long, value_name = "TOKENS")]
    #[schemars(range(min = 1))]
    pub(crate) kv_capacity: Option<u32>,
    /// GPUs that run one step together: how many, or their numbers (0,1).
    #[arg(long, value_name = "N|GPUS")]
    #[schemars(with = "Option<u32>", range(min = 1, max = 8))]
    pub(crate) gpus: Option<Gpus>,
    /// Run as many parts of one GPU as if each were a GPU of its own: a test of --gpus with one GPU.
    #[arg(long, value_name = "N", conflicts_with = "gpus", value_parser = emulated)]
    #[schemars(range(min = 2, max = 8))]
    pub(crate) emulate: Option<u32>,
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) kv: KvArgs,
}

#[derive(Debug, Args, Deserialize, JsonSchema)]
pub(crate) struct DoctorArgs {
    /// Also say what this model needs in memory: a Hugging Face folder, a model of the Hub that is in the cache, or a preset.
    /// No weights are read.
    #[arg(long, short, value_name = "DIR|ORG/NAME|PRESET")]
    pub(crate) model: Option<String>,
    /// Capacity of the key/value cache in tokens. Default: the model's positions, at most 4096.
    #[arg(long, value_name = "TOKENS", requires = "model")]
    pub(crate) kv_capacity: Option<u32>,
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) kv: KvArgs,
}

#[derive(Debug, Args, Deserialize, JsonSchema)]
pub(crate) struct ProposeArgs {
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) model: ModelArgs,
    /// The ledger of a search: proposes its incumbent instead of the rule-based default.
    #[arg(long, value_name = "FILE")]
    pub(crate) ledger: Option<PathBuf>,
}

#[derive(Debug, Args, Deserialize, JsonSchema)]
pub(crate) struct EvaluateArgs {
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) sharing: SharingArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) config: ConfigArgs,
    /// Random seed of the gate's tokens.
    #[arg(long, default_value_t = 0)]
    #[serde(default)]
    pub(crate) seed: u64,
    /// Also race the program TIMES times against its copy, as a search would, and count how often the copy would be kept. Needs the GPU.
    #[arg(long, value_name = "TIMES", value_parser = clap::value_parser!(u16).range(1..=4096))]
    #[serde(skip)]
    pub(crate) aa: Option<u16>,
}

#[derive(Clone, Debug, Default, Args, Deserialize, JsonSchema)]
pub(crate) struct LoopArgs {
    /// A Hugging Face folder, a model of the Hub or a preset. Default: smollm2-135m, or the resumed search's.
    #[arg(long, short, value_name = "DIR|ORG/NAME|PRESET")]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) sharing: SharingArgs,
    /// The GPUs of this machine that search side by side, such as 0,1 (or cuda:0,cuda:1), all of one kind. Default: the first one, or the
    /// resumed search's.
    #[arg(long, value_delimiter = ',', value_name = "GPUS", value_parser = gpu::card)]
    #[serde(default, deserialize_with = "gpu::cards")]
    #[schemars(extend("items" = gpu::card_schema()))]
    pub(crate) devices: Vec<u32>,
    /// Where the search begins: auto (shipped for this shape, else default), found, shipped, default (rule-based) or neutral (a slow
    /// start). Default: auto, or the resumed search's.
    #[arg(long, value_enum, value_name = "NAME", hide_possible_values = true)]
    #[serde(default)]
    #[schemars(with = "Option<String>", extend("enum" = ["auto", "found", "shipped", "default", "neutral"], "type" = "string"))]
    pub(crate) schedule: Option<ScheduleChoice>,
    /// Tokens of context to judge schedules at, such as 128,2048: of several, by the geometric mean of their times. Default: about 128.
    #[arg(long, value_delimiter = ',', value_name = "TOKENS")]
    #[serde(default)]
    pub(crate) context: Vec<u32>,
    /// Sequences that a step runs at once: 2, 4 or 8. Default: 1.
    #[arg(long, value_name = "N", value_parser = gpu::several)]
    pub(crate) batch: Option<u32>,
    /// When to end: a number of trials (64) or a time (90s, 10m, 2h). Default: 64, or the resumed search's.
    #[arg(long, value_name = "TRIALS|TIME")]
    pub(crate) budget: Option<Budget>,
    /// Random seed of the proposals and the gate's tokens. Default: 0, or the resumed search's.
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// The strategy: random, hill-climb or residual (the cost model, corrected by the trials here and in the store). Default: residual.
    #[arg(long, value_name = "NAME")]
    #[schemars(with = "Option<String>", extend("enum" = ["random", "hill-climb", "residual"], "type" = "string"))]
    pub(crate) strategy: Option<StrategyName>,
    /// A shell command that proposes instead: JSON lines on its standard input and output (docs/reference/cli.md, ask and tell). A
    /// resumed search needs it again: a command is never read from a ledger.
    #[arg(long, value_name = "COMMAND", conflicts_with = "strategy")]
    #[serde(skip)]
    pub(crate) proposer: Option<String>,
    /// The least gain worth keeping, in percent. Default: 1 when measured, 0.1 when predicted.
    #[arg(long, value_name = "PERCENT", value_parser = text::percent)]
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 100))]
    pub(crate) min_gain: Option<f64>,
    /// End when the kept trials save this percentage of the first schedule's time.
    #[arg(long, value_name = "PERCENT", value_parser = text::percent)]
    #[schemars(extend("exclusiveMinimum" = 0, "exclusiveMaximum" = 100))]
    pub(crate) goal: Option<f64>,
    /// End when the time is within this percentage of its bound, bytes or hand-offs.
    #[arg(long, value_name = "PERCENT", value_parser = text::percent)]
    #[schemars(range(min = 0))]
    pub(crate) stop_within: Option<f64>,
    /// On several GPUs, also try schedules whose results may differ from those of one GPU in their last bits.
    #[arg(long)]
    #[serde(default)]
    pub(crate) allow_other_bits: bool,
    /// Continue the search in --out (default: the latest one in runs/).
    #[arg(long)]
    #[serde(default)]
    pub(crate) resume: bool,
    /// Where the ledger, the table and the best schedule go. Default: a new folder in runs/.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// The store of the results of all searches; `none`: no store. Default: store.sqlite beside OUT.
    #[arg(long, value_name = "FILE|none")]
    pub(crate) store: Option<PathBuf>,
    /// What a job of a fleet fixes: never given on a command line.
    #[arg(skip)]
    #[serde(skip)]
    pub(crate) fixed: Option<FixedTerms>,
    /// Of a server that tunes itself: never given on a command line.
    #[arg(skip)]
    #[serde(skip)]
    pub(crate) start: Option<TuneStart>,
}

#[derive(Debug, Args)]
pub(crate) struct NotesArgs {
    /// The question, or some words.
    pub(crate) question: String,
    /// A page, a ledger, or a folder of pages or runs; may be repeated. Default: those of docs/decisions, docs/lab and runs that exist.
    #[arg(long = "in", value_name = "PATH")]
    pub(crate) places: Vec<PathBuf>,
    /// The most notes.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub(crate) most: u8,
}

#[derive(Debug, Args, Deserialize, JsonSchema)]
pub(crate) struct ExplainArgs {
    /// A knob's path, a rule's id, a trap's name, an exit code or a word of the glossary. Default: list them all.
    pub(crate) name: Option<String>,
}

#[derive(Debug, Args, Deserialize, JsonSchema)]
pub(crate) struct DiffArgs {
    /// A schedule (JSON: a config, or any subset of one) or a program (.amk, .amkp).
    #[schemars(
        with = "serde_json::Value",
        extend("type" = ["object", "string"]),
        description = "A schedule (a config, any subset of one, or its file), a program (.amk, .amkp) or a run (the folder of a search, or its ledger.jsonl)."
    )]
    pub(crate) a: ConfigSource,
    /// The other side of the comparison, of the same kind.
    #[schemars(with = "serde_json::Value", extend("type" = ["object", "string"]))]
    pub(crate) b: ConfigSource,
    /// Lower both schedules for this model and compare the programs and their predicted latencies too.
    #[arg(long, short, value_name = "DIR|ORG/NAME|PRESET")]
    pub(crate) model: Option<String>,
    /// The GPU to lower them for: h200, h100, a100, l40s, rtx4090, rtx5090, b200, gh200, h20, sm_90. Default: h200.
    #[arg(long, value_name = "GPU", requires = "model")]
    #[schemars(extend("enum" = target_names()))]
    pub(crate) target: Option<String>,
}

#[derive(Debug, Args, Deserialize, JsonSchema)]
pub(crate) struct ReportArgs {
    /// Ledgers, folders of a search, or folders of such folders.
    #[arg(required = true, value_name = "RUN")]
    pub(crate) runs: Vec<PathBuf>,
    /// The page to write. Default: report.html in the current folder.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Overwrite an existing file.
    #[arg(long)]
    #[serde(skip)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// A Hugging Face folder, a model of the Hub or a preset.
    #[arg(long, short, value_name = "DIR|ORG/NAME|PRESET", required_unless_present_any = ["manifest", "url"])]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) sharing: SharingArgs,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Tokens before the measured ones.
    #[arg(long, default_value_t = 128, value_name = "TOKENS")]
    pub(crate) context: u32,
    /// Random seed of the prompt.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Other engines to measure in the same run, before amk. Default: all if a GPU is measured, else none.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PEERS")]
    pub(crate) peers: Vec<PeerChoice>,
    /// Time limit of each peer in seconds, its start and compilation included.
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub(crate) peer_timeout: u64,
    /// The model as a GGUF file, for llama.cpp.
    #[arg(long, value_name = "FILE")]
    pub(crate) gguf: Option<PathBuf>,
    /// Measure the rows of this file, each in several processes, and judge them by its gates (docs/explanation/measuring.md). With it, --bundle
    /// names a folder for the bundles of the rows that are results.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "config", "schedule", "context", "seed", "rounds", "peers", "gguf", "kv_capacity", "prefill", "sequences"])]
    pub(crate) manifest: Option<PathBuf>,
    /// The time of one phase in a whole step, by traced steps, and the kernel's registers and spills.
    #[arg(long, value_name = "PHASE", conflicts_with_all = ["manifest", "bundle", "peers", "gguf", "prefill", "sequences", "seed", "rounds"])]
    pub(crate) phase: Option<String>,
    /// With --phase: also edited kernel sources, a copy of the folder vm-device, in alternation with those of this build.
    #[arg(long, value_name = "DIR", requires = "phase")]
    pub(crate) kernel_dir: Option<PathBuf>,
    /// Timed rounds of four blocks.
    #[arg(long, default_value_t = 24, value_name = "N", value_parser = clap::value_parser!(u32).range(4..=1000))]
    pub(crate) rounds: u32,
    /// Write the measurement, with the schedule and the proofs, as one file that `amk bundle` checks. Needs the GPU.
    #[arg(long, value_name = "FILE")]
    pub(crate) bundle: Option<PathBuf>,
    /// Time a prompt of this many tokens in chunks instead of a step. Needs the GPU.
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["context", "bundle", "peers", "gguf"])]
    pub(crate) prefill: Option<u32>,
    /// Time a step of this many sequences at once, and a step of one for comparison: 2, 4 or 8. Needs the GPU, and weights of 16 bits or codes.
    #[arg(long = "batch", value_name = "N", value_parser = gpu::several, conflicts_with_all = ["bundle", "peers", "gguf", "prefill"])]
    pub(crate) sequences: Option<u32>,
    #[command(flatten)]
    pub(crate) windows: WindowArgs,
    /// Append the figures to this file as a row of comma-separated values; a new file begins with the names of the columns.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["manifest", "phase"])]
    pub(crate) csv: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BundleArgs {
    /// Bundles, as `bench --bundle` writes them.
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// The model. Default: the name in the bundle.
    #[arg(long, short, value_name = "DIR|ORG/NAME|PRESET")]
    pub(crate) model: Option<String>,
    /// Run the program on the reference VM, whatever the model's size.
    #[arg(long)]
    pub(crate) reference: bool,
    /// Fail (exit code 1) if the kernel or the program that was measured is not the one of this build.
    #[arg(long)]
    pub(crate) current: bool,
}

/// Another engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, strum::Display, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub(crate) enum PeerChoice {
    /// None of them.
    None,
    /// Each one that is installed here.
    All,
    /// PyTorch, the plain step in a CUDA graph.
    TorchGraph,
    /// PyTorch, the compiled step in a CUDA graph.
    TorchCompile,
    /// llama.cpp's llama-bench, with --gguf.
    #[value(name = "llama.cpp")]
    #[strum(serialize = "llama.cpp")]
    LlamaCpp,
}

#[derive(Debug, Args)]
pub(crate) struct CalibrateArgs {
    /// Measured grids, as `grid record` writes them.
    #[arg(required = true, value_name = "FILE")]
    pub(crate) grids: Vec<PathBuf>,
    /// Points to take of each file, spread over it.
    #[arg(long, default_value_t = 250, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rows: u32,
    /// Checks (JSON lines of `levers --check`) of the schedules shipped for these models: shown and fitted beside the rows.
    #[arg(long, value_name = "FILE")]
    pub(crate) checks: Option<PathBuf>,
    /// Predict with the rates of this file instead of those of the build.
    #[arg(long, value_name = "FILE")]
    pub(crate) rates: Option<PathBuf>,
    /// Fit the rates to the rows and write them to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) fit: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct LowerArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Save the program: .amk is text, .amkp is binary.
    #[arg(long, short, alias = "out", value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

/// A saved program.
#[derive(Debug, Args)]
pub(crate) struct FileArgs {
    /// A program: .amk (text) or .amkp (binary).
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct InterpretArgs {
    /// A program: .amk (text) or .amkp (binary).
    pub(crate) file: PathBuf,
    /// The model that it was lowered from.
    #[arg(long, short, value_name = "DIR|ORG/NAME|PRESET")]
    pub(crate) model: String,
    /// Token ids to feed, separated by commas. Default: the inputs of a search's gate, sampled with --seed.
    #[arg(long, value_delimiter = ',', value_name = "IDS", value_parser = text::token)]
    pub(crate) tokens: Vec<u32>,
    /// Random seed of the tokens.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// A preset, a Hugging Face folder or a model of the Hub.
    #[arg(long, short, value_name = "DIR|ORG/NAME|PRESET")]
    pub(crate) model: String,
    /// The folder to write; it must not exist, or be empty.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct QuantizeArgs {
    /// A preset, or a Hugging Face folder or model of the Hub with weights in f32, f16 or bf16.
    #[arg(long, short, value_name = "DIR|ORG/NAME|PRESET")]
    pub(crate) model: String,
    /// The format of the matrices of the layers.
    #[arg(long, value_enum)]
    pub(crate) format: WeightFormat,
    /// The folder to write; it must not exist, or be empty.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Quantise lm_head too. One that is tied to the embedding is written beside it. Default: as it is.
    #[arg(long, value_name = "FORMAT", value_parser = clap::builder::PossibleValuesParser::new(["int8"]))]
    pub(crate) lm_head: Option<String>,
}

/// A format of quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub(crate) enum WeightFormat {
    /// e4m3, a scale per row.
    Fp8,
    /// 8-bit integers, a scale per row.
    Int8,
    /// 4-bit integers, a scale per 128 columns of a row.
    #[value(name = "int4-g128")]
    #[strum(serialize = "int4-g128")]
    Int4G128,
}

#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    /// A JSON file, JSON lines, or the folder of a run.
    #[arg(value_name = "FILE|RUN")]
    pub(crate) path: PathBuf,
    /// What to write; it must not exist.
    #[arg(long, value_name = "FILE|RUN")]
    pub(crate) out: PathBuf,
}

/// The names of the targets, and `None` for the default.
fn target_names() -> Vec<Option<&'static str>> {
    ir::Target::names().map(Some).chain([None]).collect()
}
