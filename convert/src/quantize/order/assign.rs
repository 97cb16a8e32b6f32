//! Rows to places at the least cost: the auction algorithm.
//!
//! Every place of a group costs a row the same, and every place takes one row. Rows without
//! a place bid: a row takes the place that costs it least, price included, and raises
//! its price by what the next best place would cost more, plus a little, ε. Who had the
//! place before bids again. When all have a place, the sum of costs is within ε per row of
//! the least (Bertsekas, *The auction algorithm: a distributed relaxation method for the
//! assignment problem*, Annals of Operations Research 14, 1988).
//!
//! The places of a group are alike, so only the cheapest two of each group matter to a bid.

use std::collections::VecDeque;

/// ε as a part of what a row costs at least, in the mean.
const STEP: f64 = 1e-3;

/// A place and who has it.
#[derive(Clone, Copy)]
struct Place {
    price: f64,
    row: Option<usize>,
}

/// Divides `rows` rows into groups of `size`, the last of which may be smaller. `costs` has a row
/// for each and a column for each group. Returns the rows group by group.
pub(super) fn assign(costs: &[f32], rows: usize, size: usize) -> Vec<usize> {
    let groups = rows.div_ceil(size);
    let least = costs
        .chunks(groups)
        .map(|row| row.iter().copied().fold(f32::MAX, f32::min));
    let step = STEP * least.map(f64::from).sum::<f64>() / rows.max(1) as f64;
    // Costs that are all zero leave nothing to choose, but prices must rise.
    let step = step.max(f64::from(f32::MIN_POSITIVE));
    let empty = Place {
        price: 0.0,
        row: None,
    };
    let mut places: Vec<Vec<Place>> = (0..groups)
        .map(|group| vec![empty; size.min(rows - group * size)])
        .collect();
    let mut cheapest = vec![0.0f64; groups];
    let mut waiting: VecDeque<usize> = (0..rows).collect();
    while let Some(row) = waiting.pop_front() {
        let (mut best, mut second, mut group) = (f64::INFINITY, f64::INFINITY, 0);
        let offers = costs[row * groups..][..groups].iter().zip(&cheapest);
        for (at, (cost, price)) in offers.enumerate() {
            let offer = f64::from(*cost) + price;
            if offer < best {
                (second, best, group) = (best, offer, at);
            } else if offer < second {
                second = offer;
            }
        }
        let cost = f64::from(costs[row * groups + group]);
        let (place, next) = two_cheapest(&places[group]);
        // The next best place may be in the same group.
        let second = second.min(cost + next);
        let raise = if second.is_finite() {
            second - best
        } else {
            0.0
        };
        let place = &mut places[group][place];
        place.price += raise + step;
        cheapest[group] = next.min(place.price);
        waiting.extend(place.row.replace(row));
    }
    places
        .iter()
        .flatten()
        .filter_map(|place| place.row)
        .collect()
}

/// The cheapest place, and the price of the next.
fn two_cheapest(places: &[Place]) -> (usize, f64) {
    let (mut best, mut second, mut at) = (f64::INFINITY, f64::INFINITY, 0);
    for (place, Place { price, .. }) in places.iter().enumerate() {
        if *price < best {
            (second, best, at) = (best, *price, place);
        } else if *price < second {
            second = *price;
        }
    }
    (at, second)
}
