//! Prompts that a person picks in a client: what to do first, in which order, and what must not be done.

use rmcp::model::{
    ErrorData, GetPromptResult, JsonObject, Prompt, PromptArgument, PromptMessage, Role,
};

/// A prompt, and its arguments with what each means; the first one is required.
struct Template {
    name: &'static str,
    title: &'static str,
    description: &'static str,
    arguments: &'static [(&'static str, &'static str)],
    text: fn(&Value<'_>) -> String,
}

/// The value of an argument by its name; empty if it was not given.
type Value<'a> = dyn Fn(&str) -> String + 'a;

const TEMPLATES: [Template; 2] = [
    Template {
        name: "tune",
        title: "Tune a model's schedule",
        description: "Search for a faster schedule of a model and hand over what was found.",
        arguments: &[
            ("model", "A folder, a .gguf file, a hub id or a preset."),
            ("budget", "Trials, or a time such as 30m. Default: 64."),
        ],
        text: |given| {
            let (model, budget) = (given("model"), given("budget"));
            let budget = if budget.is_empty() { "64".to_owned() } else { budget };
            format!(
                "Find a faster schedule for the model {model:?} with the tools of amk. Read amk://harness first. Then: \
                `doctor` for what this machine can do; `propose`; `trace` for where the time of a step goes; `loop` with \
                \"budget\": {budget:?} and \"background\": true, followed with `status`. When it has ended, argue for one \
                change that it did not try and `evaluate` it. At the end `runs` with \"verify\": true must hold. Report the \
                best latency and whether it is measured or predicted, the default's beside it, what was kept and why, and \
                the schedule. Never compare a predicted latency with a measured one."
            )
        },
    },
    Template {
        name: "explain_run",
        title: "Explain a search",
        description: "What a search tried, what helped, and what to try next.",
        arguments: &[("run", "The name of its folder in runs, such as 0001.")],
        text: |given| {
            format!(
                "Read the resource amk://runs/{} and explain this search in a few sentences: the best latency against the \
                first one and whether it is measured or predicted, which changes were kept and by how much each helped, \
                what ended the other trials, and whether the champion was confirmed. Look up unknown words with `explain`. \
                Then name the one or two knobs that you would try next, with a reason from `trace`.",
                given("run")
            )
        },
    },
];

pub(super) fn list() -> Vec<Prompt> {
    let prompt = |template: &Template| {
        let argument = |(index, (name, meaning)): (usize, &(&str, &str))| {
            PromptArgument::new(*name).with_description(*meaning).with_required(index == 0)
        };
        let arguments = template.arguments.iter().enumerate().map(argument).collect();
        Prompt::new(template.name, Some(template.description), Some(arguments))
            .with_title(template.title)
    };
    TEMPLATES.iter().map(prompt).collect()
}

/// The messages of a prompt.
pub(super) fn get(name: &str, given: &JsonObject) -> Result<GetPromptResult, ErrorData> {
    let wrong = |message: String| Err(ErrorData::invalid_params(message, None));
    let Some(template) = TEMPLATES.iter().find(|template| template.name == name) else {
        let known = TEMPLATES.each_ref().map(|template| template.name).join(", ");
        return wrong(format!("there is no prompt `{name}`; there are {known}"));
    };
    let known: Vec<&str> = template.arguments.iter().map(|(name, _)| *name).collect();
    if let Some(unknown) = given.keys().find(|key| !known.contains(&key.as_str())) {
        return wrong(format!("`{name}` has no argument `{unknown}`; it has {}", known.join(", ")));
    }
    let value =
        |key: &str| given.get(key).and_then(|value| value.as_str()).unwrap_or("").to_owned();
    if value(known[0]).is_empty() {
        return wrong(format!("`{name}` needs the argument `{}`, a text", known[0]));
    }
    let message = PromptMessage::new_text(Role::User, (template.text)(&value));
    Ok(GetPromptResult::new(vec![message]).with_description(template.description))
}
