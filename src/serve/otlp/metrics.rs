//! OpenMetrics text as OTLP's metrics, so that a collector gets the names and values of `/metrics`.

use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, Sum,
    metric::Data, number_data_point,
};

use super::attribute;

/// The lines of one metric.
#[derive(Default)]
struct Family<'a> {
    name: &'a str,
    help: &'a str,
    kind: &'a str,
    unit: &'a str,
    samples: Vec<Sample<'a>>,
}

struct Sample<'a> {
    /// What its name has beyond the family's.
    suffix: &'a str,
    labels: Vec<(&'a str, String)>,
    value: f64,
}

/// The metrics of a text that this program has written, whose sums began at `began_ns`.
pub(super) fn of_text(text: &str, began_ns: u64, now_ns: u64) -> Vec<Metric> {
    families(text).iter().map(|family| metric(family, (began_ns, now_ns))).collect()
}

fn families(text: &str) -> Vec<Family<'_>> {
    let mut families: Vec<Family<'_>> = Vec::new();
    for line in text.lines() {
        let comment = line.strip_prefix("# ").and_then(|comment| {
            let (what, rest) = comment.split_once(' ')?;
            let (name, text) = rest.split_once(' ')?;
            Some((what, name, text))
        });
        match (comment, families.last_mut()) {
            (Some(("HELP", name, help)), _) => {
                families.push(Family { name, help, ..Family::default() });
            }
            (Some(("TYPE", _, kind)), Some(family)) => family.kind = kind,
            (Some(("UNIT", _, unit)), Some(family)) => family.unit = unit,
            (None, Some(family)) => family.samples.extend(sample(line, family.name)),
            _ => {}
        }
    }
    families
}

/// A line `NAME{LABEL="VALUE",...} NUMBER`.
fn sample<'a>(line: &'a str, family: &str) -> Option<Sample<'a>> {
    let (series, value) = line.rsplit_once(' ')?;
    let (name, labels) = match series.split_once('{') {
        Some((name, rest)) => (name, labels(rest.strip_suffix('}')?)),
        None => (series, Vec::new()),
    };
    let value = match value {
        "+Inf" => f64::INFINITY,
        number => number.parse().ok()?,
    };
    Some(Sample { suffix: name.strip_prefix(family)?, labels, value })
}

fn labels(mut text: &str) -> Vec<(&str, String)> {
    let mut labels = Vec::new();
    while let Some((name, rest)) = text.split_once("=\"") {
        let (mut value, mut escaped, mut end) = (String::new(), false, rest.len());
        for (at, c) in rest.char_indices() {
            match (escaped, c) {
                (true, 'n') => value.push('\n'),
                (false, '\\') => {}
                (false, '"') => {
                    end = at;
                    break;
                }
                _ => value.push(c),
            }
            escaped = !escaped && c == '\\';
        }
        labels.push((name.trim_start_matches(','), value));
        text = rest.get(end + 1..).unwrap_or_default();
    }
    labels
}

fn metric(family: &Family<'_>, times: (u64, u64)) -> Metric {
    let aggregation_temporality = AggregationTemporality::Cumulative as i32;
    let data = match family.kind {
        "counter" => Data::Sum(Sum {
            data_points: numbers(family, times),
            aggregation_temporality,
            is_monotonic: true,
        }),
        "histogram" => Data::Histogram(Histogram {
            data_points: histograms(family, times),
            aggregation_temporality,
        }),
        _ => Data::Gauge(Gauge { data_points: numbers(family, (0, times.1)) }),
    };
    let unit = match family.unit {
        "seconds" => "s",
        "bytes" => "By",
        other => other,
    };
    Metric {
        name: family.name.to_owned(),
        description: family.help.to_owned(),
        unit: unit.to_owned(),
        data: Some(data),
        ..Metric::default()
    }
}

fn attributes(labels: &[(&str, String)]) -> Vec<KeyValue> {
    let of = |(name, value): &(&str, String)| {
        attribute(name, any_value::Value::StringValue(value.clone()))
    };
    labels.iter().filter(|(name, _)| *name != "le").map(of).collect()
}

fn numbers(family: &Family<'_>, (began_ns, now_ns): (u64, u64)) -> Vec<NumberDataPoint> {
    let point = |sample: &Sample<'_>| NumberDataPoint {
        attributes: attributes(&sample.labels),
        start_time_unix_nano: began_ns,
        time_unix_nano: now_ns,
        value: Some(number_data_point::Value::AsDouble(sample.value)),
        ..NumberDataPoint::default()
    };
    family.samples.iter().map(point).collect()
}

fn histograms(family: &Family<'_>, (began_ns, now_ns): (u64, u64)) -> Vec<HistogramDataPoint> {
    let mut points: Vec<HistogramDataPoint> = Vec::new();
    for sample in &family.samples {
        let attributes = attributes(&sample.labels);
        let known = points.iter().position(|point| point.attributes == attributes);
        let at = known.unwrap_or(points.len());
        if known.is_none() {
            points.push(HistogramDataPoint {
                attributes,
                start_time_unix_nano: began_ns,
                time_unix_nano: now_ns,
                ..HistogramDataPoint::default()
            });
        }
        let Some(point) = points.get_mut(at) else { continue };
        match sample.suffix {
            "_sum" => point.sum = Some(sample.value),
            "_count" => point.count = sample.value as u64,
            // Those of the text count all that is not above their bound.
            _ => {
                let below: u64 = point.bucket_counts.iter().sum();
                point.bucket_counts.push((sample.value as u64).saturating_sub(below));
                let bound = sample.labels.iter().find(|(name, _)| *name == "le");
                let bound = bound.and_then(|(_, text)| text.parse().ok());
                point.explicit_bounds.extend(bound.filter(|bound: &f64| bound.is_finite()));
            }
        }
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_becomes_metrics_of_its_kinds() {
        let text = r#"# HELP a_seconds Time.
# TYPE a_seconds counter
# UNIT a_seconds seconds
a_seconds_total{of="x\"y\\n\n"} 1.5
a_seconds_total{of=""} 2
# HELP b Now.
# TYPE b gauge
b -3
# HELP c Who.
# TYPE c info
c_info{model="m, {n}"} 1
# HELP d How long.
# TYPE d histogram
d_sum{m="1"} 6.5
d_count{m="1"} 9
d_bucket{le="0.5",m="1"} 4
d_bucket{le="1",m="1"} 4
d_bucket{le="+Inf",m="1"} 9
# EOF
"#;
        let found = of_text(text, 3, 8);
        let names = found.iter().map(|m| (m.name.as_str(), m.unit.as_str())).collect::<Vec<_>>();
        assert_eq!(names, [("a_seconds", "s"), ("b", ""), ("c", ""), ("d", "")]);
        let string = |text: &str| any_value::Value::StringValue(text.to_owned());
        let number = number_data_point::Value::AsDouble;
        let Some(Data::Sum(sum)) = &found[0].data else { panic!("{found:?}") };
        assert!(sum.is_monotonic && sum.aggregation_temporality == 2, "{sum:?}");
        assert_eq!(sum.data_points[0].attributes, [attribute("of", string("x\"y\\n\n"))]);
        let times = |p: &NumberDataPoint| (p.start_time_unix_nano, p.time_unix_nano, p.value);
        assert_eq!(times(&sum.data_points[0]), (3, 8, Some(number(1.5))));
        assert_eq!(times(&sum.data_points[1]), (3, 8, Some(number(2.0))));
        let Some(Data::Gauge(gauge)) = &found[1].data else { panic!("{found:?}") };
        assert_eq!(gauge.data_points[0].value, Some(number(-3.0)));
        let Some(Data::Gauge(info)) = &found[2].data else { panic!("{found:?}") };
        assert_eq!(info.data_points[0].attributes, [attribute("model", string("m, {n}"))]);
        let Some(Data::Histogram(histogram)) = &found[3].data else { panic!("{found:?}") };
        let [point] = &histogram.data_points[..] else { panic!("{histogram:?}") };
        assert_eq!((point.count, point.sum), (9, Some(6.5)));
        assert_eq!(
            (&point.bucket_counts[..], &point.explicit_bounds[..]),
            (&[4, 0, 5][..], &[0.5, 1.0][..])
        );
    }
}
