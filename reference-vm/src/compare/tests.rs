use super::*;

fn rows() -> Vec<Vec<f32>> {
    vec![vec![1.0, -4.0, 2.0], vec![0.5, 0.25, 8.0]]
}

fn refusal(expected: &[Vec<f32>], actual: &[Vec<f32>]) -> Disagreement {
    compare(expected, actual, Tolerance::REFERENCE).unwrap_err()
}

#[test]
fn equal_rows_agree_exactly() {
    let summary = compare(&rows(), &rows(), Tolerance::REFERENCE).unwrap().summary();
    assert_eq!(summary, Summary { top1_agreement: 1.0, ..Summary::default() });
}

#[test]
fn the_bound_scales_with_the_row_and_not_with_the_other_rows() {
    let mut actual = rows();
    actual[0][0] += 7e-4;
    let summary = compare(&rows(), &actual, Tolerance::REFERENCE).unwrap().summary();
    assert!(
        (summary.max_abs_err - 7e-4).abs() < 1e-6
            && (summary.max_rel_err - 7e-4 / 4.0).abs() < 1e-6
    );

    actual[0][0] += 2e-4;
    let Disagreement::Beyond { what, position, index, got, want, bound } =
        refusal(&rows(), &actual)
    else {
        panic!("another reason");
    };
    assert_eq!((what, position, index, got, want), (What::Logits, 0, 0, actual[0][0], 1.0));
    assert!((bound - 8e-4).abs() < 1e-9);
}

#[test]
fn lengths_must_match_and_nothing_proves_nothing() {
    assert_eq!(
        refusal(&rows(), &rows()[..1]),
        Disagreement::Positions { what: What::Logits, want: 2, got: 1 }
    );
    let mut actual = rows();
    actual[1].pop();
    let elements = Disagreement::Elements { what: What::Logits, position: 1, want: 3, got: 2 };
    assert_eq!(refusal(&rows(), &actual), elements);
    assert_eq!(refusal(&[], &[]), Disagreement::Nothing { what: What::Logits, position: 0 });
    assert_eq!(
        refusal(&[vec![]], &[vec![]]),
        Disagreement::Nothing { what: What::Logits, position: 0 }
    );
}

#[test]
fn what_is_not_finite_disagrees_even_with_itself() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut broken = rows();
        broken[1][2] = value;
        for (expected, actual) in
            [(rows(), broken.clone()), (broken.clone(), rows()), (broken.clone(), broken)]
        {
            assert!(matches!(
                refusal(&expected, &actual),
                Disagreement::NotFinite { what: What::Logits, position: 1, index: 2, .. }
            ));
        }
    }
}

#[test]
fn values_extend_an_agreement_and_can_end_it() {
    let agreement = || compare(&rows(), &rows(), Tolerance::REFERENCE).unwrap();
    let (want, got) = ([1.0f32, 2.0, 3.0, 4.0], [1.0f32, 2.0, 3.0, 4.0005]);
    let what = What::Keys(3);
    let extended = agreement().and_values(
        what,
        want.chunks_exact(2),
        got.chunks_exact(2),
        Tolerance::REFERENCE,
    );
    assert!((extended.unwrap().summary().max_abs_err - 5e-4).abs() < 1e-6);
    let got = [1.0f32, 2.1, 3.0, 4.0];
    let ended = agreement().and_values(
        what,
        want.chunks_exact(2),
        got.chunks_exact(2),
        Tolerance::REFERENCE,
    );
    let text = ended.unwrap_err().to_string();
    assert_eq!(
        text,
        "keys of layer 3 differ at position 0, index 1: got 2.1, want 2 within 4.000e-4"
    );
}

#[test]
fn the_device_follows_the_reference() {
    let mut actual = rows();
    actual[1][2] += 0.03;
    let reference = compare(&rows(), &rows(), Tolerance::REFERENCE).unwrap();
    let device: Agreement<Device> =
        reference.and_device(&rows(), &actual, &chosen(&actual), Tolerance::DEVICE).unwrap();
    assert!((device.summary().max_rel_err - 0.03 / 8.0).abs() < 1e-6);
    actual[1][2] += 0.03;
    assert!(reference.and_device(&rows(), &actual, &chosen(&actual), Tolerance::DEVICE).is_err());
}

fn chosen(rows: &[Vec<f32>]) -> Vec<u32> {
    rows.iter().map(|row| argmax(row)).collect()
}

#[test]
fn a_device_goes_on_with_the_token_that_its_logits_say() {
    let reference = compare(&rows(), &rows(), Tolerance::REFERENCE).unwrap();
    let right = chosen(&rows());
    let ended = |chosen: &[u32]| {
        let ended = reference.and_device(&rows(), &rows(), chosen, Tolerance::DEVICE);
        ended.map(|_| ()).map_err(|at| at.to_string())
    };
    assert_eq!(ended(&right), Ok(()));
    let mut wrong = right.clone();
    wrong[1] += 1;
    let text = format!(
        "token {} was chosen at position 1 where the device's own logits say {}",
        wrong[1], right[1]
    );
    assert_eq!(ended(&wrong), Err(text));
    let text = format!("chosen tokens have 1 positions instead of {}", right.len());
    assert_eq!(ended(&right[..1]), Err(text));
}

#[test]
fn top1_counts_positions() {
    let expected = [vec![1.0, 1.0001], vec![0.0, 1.0]];
    let actual = [vec![1.0001, 1.0], vec![0.0, 1.0]];
    assert_eq!(
        compare(&expected, &actual, Tolerance::REFERENCE).unwrap().summary().top1_agreement,
        0.5
    );
}

#[test]
fn tolerances_follow_dtype_and_length() {
    let of = |dtype, len| Tolerance::of_reduction(dtype, len).rel();
    assert_eq!(of(DType::F32, 1), 2f64.powi(-21));
    assert_eq!(of(DType::F32, 4096), 2f64.powi(-15));
    assert!(of(DType::F32, 64) < of(DType::F16, 64) && of(DType::F16, 64) < of(DType::Bf16, 64));
    assert!(of(DType::F32, 128 * 1024) < Tolerance::REFERENCE.rel());
}

#[test]
fn what_rounding_does_is_what_is_allowed() {
    let of = |response, longest| Tolerance::of_response(response, longest).rel();
    // Four times the effect of the roundings; sums of 8192 products add as much again, in squares.
    assert_eq!(of(1e-5, 32), 4e-5 * (1.0 + 1.0 / 256.0f64).sqrt());
    assert_eq!(of(1e-5, 8192), 4e-5 * 2f64.sqrt());
    // A model that is unaffected by rounding may still be summed in another order.
    assert_eq!(of(0.0, 8192), Tolerance::of_reduction(DType::F32, 256).rel());
    // A model that amplifies rounding too much is held to the device's tolerance.
    assert_eq!(of(1.0, 32), Tolerance::DEVICE.rel());
    assert_eq!(of(f64::INFINITY, 32), Tolerance::DEVICE.rel());
}

#[test]
fn distance_is_of_the_worst_row_and_infinite_where_there_is_none() {
    let of = |want: &[Vec<f32>], got: &[Vec<f32>]| {
        distance(want.iter().map(Vec::as_slice), got.iter().map(Vec::as_slice))
    };
    let mut actual = rows();
    assert_eq!(of(&rows(), &actual), 0.0);
    (actual[0][0], actual[1][1]) = (1.5, 0.5);
    assert_eq!(of(&rows(), &actual), 0.5 / 4.0);
    assert_eq!(of(&rows(), &actual[..1]), f64::INFINITY);
    actual[1][1] = f32::NAN;
    assert_eq!(of(&rows(), &actual), f64::INFINITY);
    assert_eq!(of(&[vec![0.0]], &[vec![1.0]]), f64::INFINITY);
}

#[test]
fn a_device_is_allowed_what_its_roundings_do_and_never_more_than_the_constant() {
    let of = |response, longest| Tolerance::of_device(KvDtype::F16, response, longest).rel();
    assert_eq!(of(1e-3, 0), 2e-3);
    // A sum of 16 products is one step of a tensor core, which may truncate one unit in the last place.
    assert!((of(0.0, 16) - 2f64.powi(-23)).abs() < 1e-20);
    assert_eq!(of(0.0, 14336), 896.0 * 2f64.powi(-23));
    assert!(of(5e-4, 8192) > of(5e-4, 2048) && of(6e-4, 2048) > of(5e-4, 2048));
    for beyond in [2.5e-3, 1.0, f64::INFINITY] {
        assert_eq!(of(beyond, 32), Tolerance::DEVICE.rel());
    }
}

#[test]
fn an_agreement_says_how_much_of_its_tolerance_was_used() {
    let (want, got) = ([1.0f32, 2.0], [1.0f32, 2.000_1]);
    let agreement = compare(&rows(), &rows(), Tolerance::REFERENCE)
        .unwrap()
        .and_values(
            What::Values(0),
            want.chunks_exact(2),
            got.chunks_exact(2),
            Tolerance::REFERENCE,
        )
        .unwrap();
    assert!((agreement.summary().max_tolerance_used - 0.25).abs() < 1e-3);
}

#[test]
fn positions_are_counted_from_where_the_rows_begin() {
    let mut actual = rows();
    actual[1][2] = 9.0;
    let at = refusal(&rows(), &actual).from_position(1023);
    assert!(at.to_string().starts_with("logits differ at position 1024, index 2"), "{at}");
}
