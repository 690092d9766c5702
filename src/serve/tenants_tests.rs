use std::time::Duration;

use serde_json::json;

use super::*;

fn opened(list: &Value) -> Result<Tenants, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tenants.json");
    std::fs::write(&path, list.to_string()).unwrap();
    Tenants::open(&path).map_err(|failure| failure.message)
}

fn caller(terms: Value) -> Caller {
    let mut one = json!({"name": "web", "key": "k"});
    one.as_object_mut().unwrap().extend(terms.as_object().unwrap().clone());
    let tenants = opened(&json!({"tenants": [one]})).unwrap();
    tenants.keys().next().unwrap().1
}

#[test]
fn all_problems_of_a_file_come_at_once() {
    let why = opened(&json!({"tenants": [
        {"name": "a", "key": "1", "share": 0, "service_tier": "gold"},
        {"name": "a", "key": "1", "requests": 0},
        {"name": "", "key": " ", "share": 1001},
    ]}))
    .unwrap_err();
    for part in [
        "tenants[0]: `share` is 0; legal: 1 to 1000",
        "tenants[0]: `service_tier` is no tier",
        "tenants[1]: `name` is empty or that of another",
        "tenants[1]: `key` is empty or that of another",
        "tenants[1]: `requests` or `tokens_per_minute` is 0",
        "tenants[2]: `name` is empty",
        "tenants[2]: `key` is empty",
        "tenants[2]: `share` is 1001",
    ] {
        assert!(why.contains(part), "{part}: {why}");
    }
    assert!(opened(&json!({"tenants": []})).unwrap_err().contains("is empty"));
    assert!(opened(&json!({"tenants": [{"name": "a", "kee": "1"}]})).unwrap_err().contains("kee"));
}

#[test]
fn a_tenant_has_as_many_requests_as_it_may() {
    let caller = caller(json!({"requests": 2}));
    let held = [caller.enter().unwrap(), caller.enter().unwrap()];
    let refusal = caller.enter().unwrap_err();
    assert_eq!((refusal.status.as_u16(), refusal.code), (429, Some("tenant_full")));
    drop(held);
    caller.enter().unwrap();
}

#[test]
fn tokens_come_back_by_the_minute() {
    let caller = caller(json!({"tokens_per_minute": 60}));
    caller.enter().unwrap();
    caller.used(90);
    let refusal = caller.enter().unwrap_err();
    assert_eq!((refusal.status.as_u16(), refusal.code), (429, Some("tenant_tokens")));
    let account = caller.0.unwrap();
    let mut budget = account.budget.as_ref().unwrap().lock().unwrap();
    let at = budget.at;
    assert!((budget.left(at + Duration::from_secs(29)) - -1.0).abs() < 0.01);
    assert!((budget.left(at + Duration::from_secs(40)) - 10.0).abs() < 0.01);
    assert_eq!(budget.left(at + Duration::from_secs(4000)).to_bits(), 60_f64.to_bits());
}

#[test]
fn a_tier_is_the_highest_that_a_tenant_gets() {
    let low = caller(json!({"service_tier": "flex"}));
    assert_eq!(low.priority(Priority::High), Priority::Low);
    let any = caller(json!({}));
    assert_eq!(any.priority(Priority::High), Priority::High);
    assert_eq!(Caller::default().priority(Priority::High), Priority::High);
}

#[test]
fn without_keys_of_tenants_users_are_tenants() {
    let of = |fields: Value| Caller::default().tenant(fields.as_object().unwrap());
    let ann = of(json!({"user": "ann"}));
    assert_eq!(ann, of(json!({"safety_identifier": "ann"})));
    assert_eq!(ann, of(json!({"metadata": {"user_id": "ann"}})));
    assert_ne!(ann, of(json!({"user": "bob"})));
    assert_eq!(of(json!({"user": 5})), Tenant::default());
    let keyed = caller(json!({"share": 7}));
    let tenant = keyed.tenant(json!({"user": "ann"}).as_object().unwrap());
    assert_eq!((&*tenant.name, tenant.share), ("web", 7));
}

#[test]
fn metrics_say_who_used_what() {
    let list = json!({"tenants": [
        {"name": "a", "key": "1", "share": 3}, {"name": "b", "key": "2"},
    ]});
    let tenants = opened(&list).unwrap();
    let mut registry = Registry::default();
    tenants.register(&mut registry);
    let callers: Vec<Caller> = tenants.keys().map(|(_, caller)| caller).collect();
    callers[0].enter().unwrap();
    callers[0].used(100);
    callers[1].used(100);
    tenants.update();
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    for sample in [
        "amk_tenant_requests_total{tenant=\"a\"} 1",
        "amk_tenant_requests_total{tenant=\"b\"} 0",
        "amk_tenant_tokens_total{tenant=\"b\"} 100",
        "amk_tenant_skew{tenant=\"a\"} 0.6666666666666666",
        "amk_tenant_skew{tenant=\"b\"} 2.0",
    ] {
        assert!(text.contains(&format!("{sample}\n")), "{sample}: {text}");
    }
    assert_eq!(text.matches("# TYPE amk_tenant_tokens ").count(), 1, "{text}");
}
