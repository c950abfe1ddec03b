use ratekeeper_core::{Decision, Limit, RetryAfter};

use super::denial::DenialText;
use super::headers::{FixedMember, HeaderSpec};
use super::{DenialResponse, HeaderSet, LimitDecision, PolicyName};

/// The text of a limit's responses that is the same for every decision, prepared once.
///
/// ```
/// use std::time::Duration;
/// use ratekeeper_core::{Limit, WindowAlign};
/// use ratekeeper_rules::response::{HeaderSet, LimitDecision, LimitText, PolicyName};
///
/// let limit = Limit::fixed_window(2, Duration::from_secs(60), WindowAlign::Clock)?;
/// let name = PolicyName::new("per-user")?;
/// let text = LimitText::new(HeaderSet::default(), &name, &limit, None);
/// # let decision = ratekeeper_core::Decision { allowed: true, limit: 2, remaining: 1, retry_after: ratekeeper_core::RetryAfter::Now, reset_after: Duration::ZERO, delay: Duration::ZERO };
/// let decision = LimitDecision { text: Some(&text), ..LimitDecision::new(&name, &limit, decision) };
/// # let _ = decision;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct LimitText {
    /// For each header of the set.
    members: Box<[FixedMember]>,
    denial: DenialText,
}

impl LimitText {
    /// Prepares the text of a limit with this name and custom response, for responses with the headers of this set.
    pub fn new(
        set: HeaderSet,
        name: &PolicyName,
        limit: &Limit,
        custom: Option<&DenialResponse>,
    ) -> LimitText {
        // Any decision: what depends on it is not prepared.
        let decision = Decision {
            allowed: true,
            limit: limit.limit(),
            remaining: 0,
            retry_after: RetryAfter::Now,
            reset_after: std::time::Duration::ZERO,
            delay: std::time::Duration::ZERO,
        };
        let of_limit = LimitDecision::new(name, limit, decision);
        LimitText {
            members: set.lines().iter().map(|line| line.fixed_member(&of_limit)).collect(),
            denial: DenialText::new(name, limit, custom),
        }
    }

    /// The fixed beginning of the limit's member of a header, whose position in its set is `line`.
    pub(super) fn member(&self, header: &HeaderSpec, line: usize) -> Option<&FixedMember> {
        self.members.get(line).filter(|member| std::ptr::eq(member.header, header))
    }

    pub(super) fn denial(&self) -> &DenialText {
        &self.denial
    }
}
