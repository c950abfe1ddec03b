//! Medians of the figures of rounds.
#![allow(clippy::float_arithmetic, reason = "figures for people; nothing is decided by them")]

/// The median; the number of rounds is odd. NaN without rounds.
pub(crate) fn median(figures: impl IntoIterator<Item = f64>) -> f64 {
    let sorted = sorted(figures);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The median over the rounds of one contender's figure divided by another's.
pub(crate) fn median_ratio<'r, R: 'r>(
    rounds: impl IntoIterator<Item = &'r R>,
    others: impl IntoIterator<Item = &'r R>,
    of: impl Fn(&R) -> f64,
) -> f64 {
    median(rounds.into_iter().zip(others).map(|(one, other)| of(one) / of(other)))
}

pub(crate) fn sorted(figures: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut figures: Vec<f64> = figures.into_iter().collect();
    figures.sort_unstable_by(f64::total_cmp);
    figures
}
