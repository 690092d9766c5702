//! Whether somebody else uses the GPU. What is timed beside other work says nothing, so measurements want the card alone.

/// Decides about a measurement from what NVML lists before this program touches the device: what the conditions of the measurement say,
/// or why there is none.
pub(super) fn judge(others: Option<&[u32]>, shared: bool) -> Result<String, String> {
    match others {
        None => Ok("other processes on the GPU: unknown (no NVML)".to_owned()),
        Some([]) => Ok("other processes on the GPU: none seen".to_owned()),
        Some(others) if shared => {
            Ok(format!("other processes on the GPU: {} (--shared-gpu)", others.len()))
        }
        Some(others) => {
            let numbers: Vec<String> = others.iter().map(ToString::to_string).collect();
            Err(format!(
                "the GPU is in use by {} other {} ({}): times would be theirs too; end them, or measure all the same with --shared-gpu",
                others.len(),
                if others.len() == 1 { "process" } else { "processes" },
                numbers.join(", ")
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_in_use_is_refused_unless_it_is_asked_for() {
        assert_eq!(judge(Some(&[]), false).unwrap(), "other processes on the GPU: none seen");
        assert_eq!(judge(Some(&[]), true), judge(Some(&[]), false), "asking changes nothing");
        let refused = judge(Some(&[71, 72]), false).unwrap_err();
        for part in ["2 other processes", "71, 72", "--shared-gpu"] {
            assert!(refused.contains(part), "{refused}");
        }
        assert!(judge(Some(&[71]), false).unwrap_err().contains("1 other process ("));
        let noted = judge(Some(&[71, 72]), true).unwrap();
        assert!(noted.contains("2 (--shared-gpu)"), "{noted}");
    }

    #[test]
    fn what_is_not_known_is_no_reason_to_refuse_and_is_noted() {
        assert!(judge(None, false).unwrap().contains("unknown"));
    }
}
