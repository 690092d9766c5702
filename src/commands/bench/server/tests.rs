use std::cell::Cell;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;

use super::*;

#[test]
fn time_per_token_leaves_out_the_first() {
    let (first, whole) = (Some(Duration::from_millis(10)), Duration::from_millis(40));
    let answer = Answered { first, whole, tokens: 4, ..Answered::default() };
    assert_eq!(answer.per_token(), Some(Duration::from_millis(10)));
    assert_eq!(Answered { tokens: 1, ..answer.clone() }.per_token(), None);
    assert_eq!(Answered { tokens: 0, ..answer }.per_token(), None);
}

/// How a stand-in server answers.
#[derive(Clone, Copy)]
enum Acts {
    Answers,
    Refuses,
    BreaksOff,
    Hangs,
}

const STREAM: &str = "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\"}]}\n\n\
    data: {\"choices\":[],\"usage\":{\"completion_tokens\":2,\"prompt_tokens\":6}}\n\ndata: [DONE]\n\n";

/// Serves connections, a request each, on a thread that ends with the test's process.
fn stand_in(acts: Acts) -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::read(&format!("http://{}", listener.local_addr().unwrap()));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let mut request = [0; 1 << 14];
                let _ = stream.read(&mut request);
                let head = "content-type: text/event-stream\r\nconnection: close";
                let _ = match acts {
                    Acts::Answers => write!(
                        stream,
                        "HTTP/1.1 200 OK\r\n{head}\r\ncontent-length: {}\r\n\r\n{STREAM}",
                        STREAM.len()
                    ),
                    Acts::Refuses => write!(
                        stream,
                        "HTTP/1.1 429 Too Many Requests\r\n{head}\r\ncontent-length: 31\r\n\r\n{{\"error\": {{\"message\": \"full\"}}}} "
                    ),
                    Acts::BreaksOff => write!(
                        stream,
                        "HTTP/1.1 200 OK\r\n{head}\r\ncontent-length: 999\r\n\r\n{}",
                        &STREAM[..40]
                    ),
                    Acts::Hangs => {
                        thread::sleep(Duration::from_secs(5));
                        Ok(())
                    }
                };
            });
        }
    });
    address.unwrap_or_else(|failure| panic!("{}", failure.message))
}

fn load(acts: Acts, change: impl FnOnce(&mut Plan)) -> (Load, u32) {
    let mut plan = Plan {
        model: "m".into(),
        clients: 2,
        rate: None,
        requests: 6,
        duration: Duration::from_secs(20),
        timeout: Duration::from_secs(10),
        prompt: 6,
        shared: 0,
        answer: 2,
        vocab: 50,
        temperature: 0.0,
        seed: 1,
    };
    change(&mut plan);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = Rc::new(Client::new(stand_in(acts), None));
    let counted = Rc::new(Cell::new(0));
    let count = counted.clone();
    let run = plan.run(client, move || count.set(count.get() + 1));
    let load = tokio::task::LocalSet::new().block_on(&runtime, run);
    (load, counted.get())
}

#[test]
fn a_closed_loop_sends_every_request_once() {
    let (load, counted) = load(Acts::Answers, |_| {});
    assert_eq!((load.answered.len(), load.failed.len(), load.dropped, counted), (6, 0, 0, 6));
    for answer in &load.answered {
        assert_eq!((answer.tokens, answer.prompt, answer.gaps.len()), (2, 6, 1));
        assert!(answer.first.unwrap() <= answer.whole);
    }
    let text = plot::svg(&Kinds::of(&load.answered)).unwrap();
    assert!(text.starts_with("<svg") && text.contains("first token"), "{text}");
    assert!(plot::svg(&Kinds::of(&[])).is_ok());
}

#[test]
fn refusals_and_broken_streams_are_failures_with_their_reason() {
    let (load, _) = load(Acts::Refuses, |_| {});
    assert_eq!((load.answered.len(), &load.failed[..]), (0, &vec!["429: full".to_owned(); 6][..]));
    let (load, _) = self::load(Acts::BreaksOff, |plan| plan.requests = 1);
    assert!(load.failed[0].contains("the stream broke off"), "{:?}", load.failed);
}

#[test]
fn a_server_that_hangs_ends_with_the_time_limit_of_a_request() {
    let (load, _) = load(Acts::Hangs, |plan| {
        (plan.requests, plan.timeout) = (2, Duration::from_millis(100));
    });
    assert_eq!(load.failed, vec!["not answered in time (--timeout)"; 2]);
    assert!(load.took < Duration::from_secs(3), "{:?}", load.took);
}

#[test]
fn an_open_loop_drops_what_is_too_much_and_ends_with_its_time() {
    let (load, counted) = load(Acts::Hangs, |plan| {
        (plan.requests, plan.rate, plan.clients) = (50, Some(1000.0), 3);
        plan.timeout = Duration::from_millis(300);
    });
    assert_eq!((load.failed.len(), load.dropped, counted), (3, 47, 50));
    let (load, counted) = self::load(Acts::Answers, |plan| {
        (plan.requests, plan.rate) = (1_000_000, Some(100.0));
        (plan.duration, plan.clients) = (Duration::from_millis(200), 100);
    });
    assert!((5..60).contains(&counted), "{counted}");
    assert_eq!((load.answered.len() as u32, load.dropped), (counted, 0));
}
