//! The protocol's handlers: lists tools, prompts and resources, and runs the tools.

use std::sync::Arc;
use std::time::Duration;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorData,
    GetPromptRequestParams, GetPromptResponse, Implementation, ListPromptsResult,
    ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, PaginatedRequestParams,
    ProgressNotificationParam, ProgressToken, ReadResourceRequestParams, ReadResourceResponse,
    ReadResourceResult, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{Peer, RequestContext};
use rmcp::{RoleServer, ServerHandler};
use search::Budget;
use serde_json::{Map, Value};
use tokio::sync::watch;

use super::jobs::{Follow, Jobs, on_thread};
use super::status::Status;
use super::tools::{self, Entry, LoopCall, Run};
use super::{arguments, prompts, resources};
use crate::commands::search_loop::Progress;
use crate::failure::{Exit, Failure};
use crate::library::Search;
use crate::report::{self, Answer};

/// How long a result waits for the client to take the last progress.
const LAST_PROGRESS: Duration = Duration::from_secs(1);

const INSTRUCTIONS: &str = "amk searches for the fastest schedule of a decoder LLM's megakernel. Read the resource amk://harness first. \
    The order of work: propose (the schedule and the legal values), evaluate (one verdict on your edit), trace (where its time goes), loop (an \
    automatic search, also in the background), status, runs. You edit the schedule's knobs and nothing else; predicted latencies are never compared with measured ones.";

pub(super) struct Server {
    jobs: Arc<Jobs>,
    tools: Arc<Vec<Entry>>,
}

impl Server {
    pub(super) fn new(jobs: Arc<Jobs>) -> Result<Self, Failure> {
        Ok(Self { tools: Arc::new(tools::all(&jobs)?), jobs })
    }

    /// Runs a tool by its index in the table. The outer error is the document for wrong arguments.
    async fn run(
        &self,
        index: usize,
        given: Map<String, Value>,
        context: &RequestContext<RoleServer>,
    ) -> Result<Result<Answer<Value>, Failure>, Value> {
        let quick = match self.jobs.quick().await {
            Ok(permit) => permit,
            Err(failure) => return Ok(Err(failure)),
        };
        let given = self.tools[index].typed(given);
        let (tools, checked) = (self.tools.clone(), given.clone());
        let check = move || Ok(tools[index].problems(&checked));
        let problems = match on_thread(quick, check).await {
            Ok(problems) => problems,
            Err(failure) => return Ok(Err(failure)),
        };
        let entry = &self.tools[index];
        if !problems.is_empty() {
            return Err(arguments::document(&entry.tool.name, &problems));
        }
        let given = Value::Object(given);
        Ok(match &entry.run {
            Run::Search => self.search(given, context).await,
            Run::Quick(_) | Run::Write(_) | Run::Judge(_) => self.call(index, given, context).await,
        })
    }

    /// Runs a tool that answers from its arguments, on its own thread.
    async fn call(
        &self,
        index: usize,
        given: Value,
        context: &RequestContext<RoleServer>,
    ) -> Result<Answer<Value>, Failure> {
        let permit = match &self.tools[index].run {
            Run::Judge(_) => tokio::select! {
                turn = self.jobs.turn() => turn?,
                () = context.ct.cancelled() => return Err(Failure::refused("cancelled")),
            },
            Run::Quick(_) | Run::Write(_) | Run::Search => self.jobs.quick().await?,
        };
        let tools = self.tools.clone();
        let work = move || match &tools[index].run {
            Run::Quick(call) | Run::Write(call) | Run::Judge(call) => call(given),
            Run::Search => Err(Failure::refused("not a call")),
        };
        on_thread(permit, work).await
    }

    /// Searches until the budget is spent, or the call is cancelled.
    async fn search(
        &self,
        given: Value,
        context: &RequestContext<RoleServer>,
    ) -> Result<Answer<Value>, Failure> {
        let LoopCall { background, search: args } = tools::read(given)?;
        let (follow, turn) = self.jobs.begin()?;
        let news = context.meta.get_progress_token().map(|token| {
            let (peer, follow, news) = (context.peer.clone(), follow.clone(), follow.subscribe());
            tokio::spawn(forward(token, peer, follow, news))
        });
        let watch = follow.clone();
        let end = on_thread(turn, move || {
            // Recorded on this thread: a later status is correct even if no one awaits the result.
            let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                Search::of(args).watched(&*watch).run()
            }));
            let bug = |_| Err(Failure::bug(crate::bug::last_panic()));
            let end = Arc::new(end.unwrap_or_else(bug));
            watch.ended(end.clone());
            Ok(end)
        });
        if background {
            let lost = follow.clone();
            tokio::spawn(async move {
                if let Err(failure) = end.await {
                    lost.ended(Arc::new(Err(failure)));
                }
            });
            let document = tools::as_json(&Status::of(&self.jobs))?;
            return Ok(Answer { document, exit: Exit::Yes });
        }
        let mut end = std::pin::pin!(end);
        let end = tokio::select! {
            end = &mut end => end,
            () = context.ct.cancelled() => {
                follow.stop();
                end.await
            }
        };
        let end = end.inspect_err(|failure| {
            follow.ended(Arc::new(Err(failure.clone())));
        })?;
        if let Some(mut news) = news
            && tokio::time::timeout(LAST_PROGRESS, &mut news).await.is_err()
        {
            news.abort();
        }
        match &*end {
            Ok(found) => Ok(Answer { document: tools::as_json(found)?, exit: Exit::Yes }),
            Err(failure) => Err(failure.clone()),
        }
    }
}

/// Forwards a search's progress. What the client is too slow to take is replaced by newer progress.
async fn forward(
    token: ProgressToken,
    peer: Peer<RoleServer>,
    follow: Arc<Follow>,
    mut news: watch::Receiver<Option<Progress>>,
) {
    let mut sent = None;
    while news.changed().await.is_ok() {
        let progress = news.borrow_and_update().clone();
        // The protocol requires progress to increase.
        let new = |p: &Progress| p.last.is_some() && Some(p.trials) > sent;
        if let Some(progress) = progress.filter(new) {
            sent = Some(progress.trials);
            let told = peer.notify_progress(notification(token.clone(), &progress)).await;
            if told.is_err() {
                return;
            }
        }
        if !follow.is_running() {
            return;
        }
    }
}

fn notification(token: ProgressToken, progress: &Progress) -> ProgressNotificationParam {
    let (done, total) = match progress.budget {
        Some(Budget::Trials(most)) => (progress.trials as f64, most as f64),
        Some(Budget::Time(most)) => (progress.elapsed_s, most.as_secs_f64()),
        None => (0.0, 0.0),
    };
    let kind = progress.latency_kind.as_deref().unwrap_or_default();
    let best = match (progress.best_us, progress.best_trial) {
        (Some(us), Some(trial)) => format!("best {us:.1} us {kind} (trial {trial})"),
        _ => "nothing correct yet".to_owned(),
    };
    let last = progress.last.as_deref().unwrap_or_default();
    let words: Vec<&str> = last.split_whitespace().collect();
    ProgressNotificationParam::new(token, done.min(total)).with_total(total).with_message(format!(
        "trial {} of {}; {best}; last: {}",
        progress.trials,
        progress.budget.map(|budget| budget.to_string()).unwrap_or_default(),
        words.join(" ")
    ))
}

/// The result for an answer. An illegal schedule is a wrong argument, so the result is an error, although its verdict is complete.
fn complete(answered: Answer<Value>) -> CallToolResult {
    let illegal = answered.document["violations"].as_array().is_some_and(|list| !list.is_empty());
    let mut result = CallToolResult::structured(answered.document);
    result.is_error = Some(illegal);
    result
}

/// An error for the agent. It has no structured content, which would have to match the schema of the tool's answer.
fn error(document: &Value) -> CallToolResult {
    CallToolResult::error(vec![ContentBlock::text(document.to_string())])
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().enable_prompts();
        ServerConfig::new(capabilities.enable_resources().build())
            .with_server_info(Implementation::new("amk", env!("CARGO_PKG_VERSION")))
            .with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let tools = self.tools.iter().map(|entry| entry.tool.clone()).collect();
        Ok(ListToolsResult::with_all_items(tools))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        let entry = self.tools.iter().find(|entry| entry.tool.name == name);
        entry.map(|entry| entry.tool.clone())
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let named = |entry: &Entry| entry.tool.name == request.name;
        let Some(index) = self.tools.iter().position(named) else {
            let names: Vec<&str> = self.tools.iter().map(|entry| &*entry.tool.name).collect();
            let known = names.join(", ");
            let message = format!("there is no tool `{}`; there are {known}", request.name);
            return Err(ErrorData::invalid_params(message, None));
        };
        let given = request.arguments.unwrap_or_default();
        let failed = |failure: &Failure| report::error_document(failure.exit, &failure.message);
        let _call = match self.jobs.call() {
            Ok(call) => call,
            Err(failure) => return Ok(error(&failed(&failure)).into()),
        };
        Ok(match self.run(index, given, &context).await {
            Ok(Ok(answered)) => complete(answered),
            Ok(Err(failure)) => error(&failed(&failure)),
            Err(document) => error(&document),
        }
        .into())
    }

    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Ok(ListPromptsResult::with_all_items(prompts::list()))
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        let given = request.arguments.unwrap_or_default();
        prompts::get(&request.name, &given).map(Into::into)
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        Ok(ListResourcesResult::with_all_items(resources::list()))
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(ListResourceTemplatesResult::with_all_items(resources::templates()))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let failed = |failure: Failure| ErrorData::internal_error(failure.message, None);
        let _call = self.jobs.call().map_err(failed)?;
        // A long ledger takes a while to check.
        let (quick, uri) = (self.jobs.quick().await.map_err(failed)?, request.uri.clone());
        let found = on_thread(quick, move || resources::read(&uri).transpose());
        let contents = found.await.map_err(failed)?.ok_or_else(|| {
            let message = format!("there is no {}; there are {}", request.uri, resources::uris());
            ErrorData::resource_not_found(message, None)
        })?;
        Ok(ReadResourceResult::new(vec![contents]).into())
    }
}
