//! Spans and metrics at a collector: a stand-in that decodes what it gets, and one that never answers.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value as Any};
use opentelemetry_proto::tonic::metrics::v1::{Metric, metric::Data, number_data_point};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;

use super::*;

/// What a collector got.
#[derive(Default)]
struct Got {
    spans: Vec<Span>,
    /// The last message.
    metrics: Vec<Metric>,
    resource: Vec<KeyValue>,
    heads: Vec<String>,
}

/// Reads requests until the connection ends.
fn collect(mut stream: TcpStream, got: &Mutex<Got>) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).ok()? == 0 {
                return None;
            }
        }
        let head = head.to_ascii_lowercase();
        let length = head.split("content-length: ").nth(1)?.lines().next()?.parse().ok()?;
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        {
            let mut got = got.lock().unwrap();
            if head.starts_with("post /base/v1/traces ") {
                for of in ExportTraceServiceRequest::decode(&body[..]).unwrap().resource_spans {
                    got.spans.extend(of.scope_spans.into_iter().flat_map(|of| of.spans));
                }
            } else {
                let of = ExportMetricsServiceRequest::decode(&body[..]).unwrap().resource_metrics;
                let of = of.into_iter().next().unwrap();
                got.resource = of.resource.unwrap().attributes;
                got.metrics = of.scope_metrics.into_iter().flat_map(|of| of.metrics).collect();
            }
            got.heads.push(head);
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").ok()?;
    }
}

/// A collector's address, and what it gets.
fn collector() -> (String, Arc<Mutex<Got>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let got = Arc::<Mutex<Got>>::default();
    let shared = got.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let got = shared.clone();
            std::thread::spawn(move || collect(stream, &got));
        }
    });
    (format!("http://{address}/base/"), got)
}

fn server(endpoint: &str, more: &[(&str, &str)]) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint).envs(more.iter().copied());
    Server::start_by(command, &["--model", GOLDEN, "--device", "eval"])
}

fn attributes(all: &[KeyValue]) -> BTreeMap<&str, String> {
    let text = |value: &Any| {
        if let Any::StringValue(text) = value {
            return text.clone();
        }
        let Any::IntValue(number) = value else { panic!("{value:?}") };
        number.to_string()
    };
    let of = |a: &KeyValue| text(a.value.as_ref().unwrap().value.as_ref().unwrap());
    all.iter().map(|attribute| (attribute.key.as_str(), of(attribute))).collect()
}

#[test]
fn a_collector_gets_a_span_per_request_and_the_metrics() {
    let (endpoint, got) = collector();
    let more = [
        ("OTEL_BSP_SCHEDULE_DELAY", "20"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "20"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer k"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test"),
        ("OTEL_SERVICE_NAME", "chat"),
    ];
    let mut server = server(&endpoint, &more);
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let traced = |flags: &str, id: &str| {
        let parent = format!("traceparent: 00-{trace}-b7ad6b7169203331-{flags}");
        let head = format!("{}\r\n{parent}\r\nx-request-id: {id}", head("/v1/completions"));
        server.ask(&head, &request(json!({"max_tokens": 5, "ignore_eos": true})).to_string())
    };
    let usage = traced("01", "one").json()["usage"].clone();
    assert_eq!(traced("00", "unwanted").status, 200);
    server.complete(json!({"max_tokens": -1})).refuses(400, Some("max_tokens"));
    assert_eq!(server.get("/any/path").status, 404);
    wait_for("three spans", || got.lock().unwrap().spans.len() >= 3);
    let text = server.ask("GET /metrics HTTP/1.0\r\naccept: application/openmetrics-text", "").body;
    server.interrupt();
    assert_eq!(server.end(), 0);

    let got = got.lock().unwrap();
    let names = got.spans.iter().map(|span| span.name.as_str()).collect::<Vec<_>>();
    assert_eq!(
        names,
        ["POST /v1/completions", "POST /v1/completions", "GET"],
        "no probe, none unwanted"
    );
    let (one, refused) = (&got.spans[0], &got.spans[1]);
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(
        (&hex(&one.trace_id)[..], &hex(&one.parent_span_id)[..]),
        (trace, "b7ad6b7169203331")
    );
    let of = attributes(&one.attributes);
    assert_eq!(of["gen_ai.usage.input_tokens"], usage["prompt_tokens"].to_string());
    assert_eq!(of["gen_ai.usage.output_tokens"], "5");
    assert_eq!(
        (&of["http.response.status_code"][..], &of["http.request.header.x-request-id"][..]),
        ("200", "one")
    );
    let first = one.events[0].time_unix_nano;
    assert!(one.start_time_unix_nano < first && first < one.end_time_unix_nano, "{one:?}");
    assert!(refused.parent_span_id.is_empty() && refused.trace_id != one.trace_id, "{refused:?}");
    assert_eq!(attributes(&refused.attributes)["http.response.status_code"], "400");
    assert!(refused.status.as_ref().unwrap().message.contains("max_tokens"), "{refused:?}");
    let resource = attributes(&got.resource);
    assert_eq!(
        (&resource["service.name"][..], &resource["deployment.environment.name"][..]),
        ("chat", "test")
    );
    assert!(
        got.heads.iter().all(|head| head.contains("authorization: bearer k\r\n")),
        "{:?}",
        got.heads
    );
    same_metrics(&got.metrics, &text);
}

/// Each metric of the text is among those that were sent last, and sums have their values.
fn same_metrics(sent: &[Metric], text: &str) {
    let names = |line: &str| Some(line.strip_prefix("# TYPE ")?.split_once(' ')?.0.to_owned());
    let texts: Vec<String> = text.lines().filter_map(names).collect();
    let sents: Vec<&str> = sent.iter().map(|metric| metric.name.as_str()).collect();
    assert!(texts.len() > 40 && texts == sents, "{texts:?}\n{sents:?}");
    let value = |series: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {series} in\n{text}")).parse::<f64>().unwrap()
    };
    let of = |name: &str| sent.iter().find(|metric| metric.name == name).unwrap().data.as_ref();
    let model = format!("{{model_name=\"{MODEL}\"}}");
    let Some(Data::Sum(sum)) = of("vllm:generation_tokens") else { panic!("{sent:?}") };
    let tokens = value(&format!("vllm:generation_tokens_total{model}"));
    assert_eq!(sum.data_points[0].value, Some(number_data_point::Value::AsDouble(tokens)));
    assert!(tokens >= 10.0, "{tokens}");
    let Some(Data::Histogram(first)) = of("vllm:time_to_first_token_seconds") else {
        panic!("{sent:?}")
    };
    let counted = first.data_points[0].count;
    assert_eq!(counted as f64, value(&format!("vllm:time_to_first_token_seconds_count{model}")));
    assert_eq!(first.data_points[0].bucket_counts.iter().sum::<u64>(), counted);
}

/// A collector that takes connections and never answers: requests do not wait for it, nor does the end for long.
#[test]
fn a_dead_collector_stops_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let every = [("OTEL_BSP_SCHEDULE_DELAY", "1"), ("OTEL_METRIC_EXPORT_INTERVAL", "1")];
    let mut server = server(&endpoint, &every);
    let began = Instant::now();
    for _ in 0..20 {
        assert_eq!(server.complete(json!({"max_tokens": 2})).status, 200);
    }
    // One message waits 10 s for its answer.
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    let (sender, connected) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(listener.accept()));
    let held = connected.recv_timeout(PATIENCE).unwrap().unwrap();
    let leaving = Instant::now();
    server.interrupt();
    assert_eq!(server.end(), 0);
    assert!(leaving.elapsed() < Duration::from_secs(6), "{:?}", leaving.elapsed());
    drop(held);
}

#[test]
fn a_collector_that_cannot_be_is_refused() {
    let refused = |name: &str, value: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
        command.args(["serve", "--addr", "127.0.0.1:0", "--model", GOLDEN, "--device", "eval"]);
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a").env(name, value);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for (name, value) in
        [("OTEL_EXPORTER_OTLP_ENDPOINT", "a:4318"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]
    {
        let (code, said) = refused(name, value);
        assert!(code == Some(2) && said.contains(name) && said.contains(value), "{said}");
    }
}
