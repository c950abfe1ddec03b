//! `cargo xtask pictures`: writes the pictures of `docs/pictures` again.
//!
//! `compare.svg` is the output of a command of ours; a test of the command compares the two. `overview.svg` is drawn
//! here, and a test below compares it. Both are readable on light and dark pages.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result};

use crate::workspace::Workspace;

/// The folder of the pictures, relative to the root.
const FOLDER: &str = "docs/pictures";

/// Writes all pictures.
pub(crate) fn write() -> Result<()> {
    let workspace = Workspace::load()?;
    let folder = workspace.root.join(FOLDER);
    fs::create_dir_all(&folder).with_context(|| format!("creating {FOLDER}"))?;
    let compare =
        workspace.cargo("run --quiet -p ratekeeper-cli -- simulate --compare --format svg").output()?;
    for (name, picture) in [("compare.svg", compare), ("overview.svg", overview())] {
        fs::write(folder.join(name), picture).with_context(|| format!("writing {FOLDER}/{name}"))?;
        println!("wrote {FOLDER}/{name}");
    }
    Ok(())
}

const CSS: &str = "\
text { font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; font-size: 12px; fill: #59636e; }
.name { font-size: 14px; font-weight: 600; fill: #1f2328; }
.title { font-size: 16px; font-weight: 600; fill: #0b57b0; }
.middle { text-anchor: middle; }
.card { fill: #ffffff; stroke: #d1d9e0; }
.box { fill: #f6f8fa; stroke: #c3ccd5; }
.own { fill: #eaf3fd; stroke: #7fb2ea; }
.part { fill: #ffffff; stroke: #7fb2ea; }
.arrow { fill: none; stroke: #59636e; stroke-width: 1.5; }
.head { fill: #59636e; }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1; }
.name { fill: #e6edf3; }
.title { fill: #79b8ff; }
.card { fill: #0d1117; stroke: #3d444d; }
.box { fill: #161b22; stroke: #3d444d; }
.own { fill: #0f2138; stroke: #2f5f9e; }
.part { fill: #0d1117; stroke: #2f5f9e; }
.arrow { stroke: #9198a1; }
.head { fill: #9198a1; }
}
";

/// A rectangle in pixels.
#[derive(Clone, Copy)]
struct Area {
    x: u32,
    y: u32,
    width: u32,
    height: u32,
}

const WIDTH: u32 = 900;
const HEIGHT: u32 = 508;

// Three columns: callers, Ratekeeper, services.
const LEFT: (u32, u32) = (24, 176);
const CENTER: (u32, u32) = (288, 296);
const RIGHT: (u32, u32) = (680, 196);
/// Height of a box with two lines.
const BOX: u32 = 54;
/// Top edges of the rows.
const ROWS: [u32; 4] = [76, 144, 212, 280];
const STORE_Y: u32 = 420;

/// Draws how requests, APIs, the library and the simulator relate to the store.
fn overview() -> String {
    let mut drawing = Drawing::default();
    // Containers first: arrows cross their borders.
    drawing.ratekeeper();
    drawing.callers();
    drawing.services();
    drawing.store_and_simulator();
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" role=\"img\" aria-labelledby=\"title desc\">\n\
         <title id=\"title\">Where Ratekeeper runs</title>\n\
         <desc id=\"desc\">Clients send requests to the Ratekeeper gateway, which forwards allowed requests to your \
         services. Envoy calls the Envoy API, nginx and Traefik the HTTP API, and any language the HTTP API or the \
         Redis API. A Rust service contains the Ratekeeper library. The gateway, the APIs and the library share limits \
         through Redis, or keep them in memory. The simulator replays access logs.</desc>\n\
         <style>\n{CSS}</style>\n\
         <rect class=\"card\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"8\"/>\n{}</svg>\n",
        WIDTH - 1,
        HEIGHT - 1,
        drawing.body
    )
}

#[derive(Default)]
struct Drawing {
    body: String,
}

impl Drawing {
    fn callers(&mut self) {
        let callers = [
            ("Clients", "browsers, apps, scripts"),
            ("Envoy", "rate limit filter"),
            ("nginx, Traefik", "forward auth"),
            ("Any language", "Python, Go, Java, PHP"),
        ];
        for ((name, detail), y) in callers.into_iter().zip(ROWS) {
            self.labelled("box", Area { x: LEFT.0, y, width: LEFT.1, height: BOX }, name, detail);
        }
        let (start, end) = (LEFT.0 + LEFT.1, CENTER.0 + 18);
        for (label, y) in ["requests", "gRPC", "HTTP"].into_iter().zip(ROWS) {
            self.arrow(&[(start, y + BOX / 2), (end, y + BOX / 2)]);
            self.text("middle", start + 44, y + BOX / 2 - 7, label);
        }
        // Any language may use the Redis API and the HTTP API.
        let (upper, lower, bend) = (ROWS[3] + 14, ROWS[3] + 34, start + 68);
        self.arrow(&[(start, lower), (end, lower)]);
        self.text("middle", start + 44, lower + 17, "RESP");
        let http = ROWS[2] + BOX - 12;
        self.arrow(&[(start, upper), (bend, upper), (bend, http), (end, http)]);
        self.text("middle", start + 34, upper - 7, "HTTP");
    }

    fn ratekeeper(&mut self) {
        let (top, bottom) = (24, ROWS[3] + BOX + 20);
        self.area("own", Area { x: CENTER.0, y: top, width: CENTER.1, height: bottom - top });
        self.text("title middle", CENTER.0 + CENTER.1 / 2, top + 32, "Ratekeeper");
        let parts = [
            ("Gateway", "forwards or denies with 429"),
            ("Envoy API", "rate limit service, v3"),
            ("HTTP API", "check, peek, refund, reserve, settle"),
            ("Redis API", "RK.CHECK, CL.THROTTLE"),
        ];
        for ((name, detail), y) in parts.into_iter().zip(ROWS) {
            let area = Area { x: CENTER.0 + 18, y, width: CENTER.1 - 36, height: BOX };
            self.labelled("part", area, name, detail);
        }
        let end = CENTER.0 + CENTER.1 - 18;
        self.arrow(&[(end, ROWS[0] + BOX / 2), (RIGHT.0, ROWS[0] + BOX / 2)]);
        self.text("middle", (CENTER.0 + CENTER.1 + RIGHT.0) / 2, ROWS[0] + BOX / 2 - 7, "allowed");
        self.arrow(&[(CENTER.0 + CENTER.1 / 2, bottom), (CENTER.0 + CENTER.1 / 2, STORE_Y)]);
        self.text("", CENTER.0 + CENTER.1 / 2 + 10, bottom + 40, "shared limits");
    }

    fn services(&mut self) {
        let (x, width) = RIGHT;
        self.labelled("box", Area { x, y: ROWS[0], width, height: BOX }, "Your services", "HTTP upstreams");
        let (top, bottom) = (ROWS[1] + 16, ROWS[3] + BOX + 20);
        self.area("box", Area { x, y: top, width, height: bottom - top });
        self.text("name middle", x + width / 2, top + 30, "Your Rust service");
        for (y, name, detail) in [
            (top + 48, "tower layer", "axum, tonic"),
            (top + 48 + BOX + 12, "Rust library", "checks in the process"),
        ] {
            self.labelled("own", Area { x: x + 16, y, width: width - 32, height: BOX }, name, detail);
        }
        self.arrow(&[(x + width / 2, bottom), (x + width / 2, STORE_Y)]);
    }

    fn store_and_simulator(&mut self) {
        let height = 64;
        let x = CENTER.0 + 64;
        let width = RIGHT.0 + RIGHT.1 - x;
        let store = Area { x, y: STORE_Y, width, height };
        self.labelled(
            "box",
            store,
            "Store: Redis or memory",
            "Redis: one limit for all instances. Memory: limits of one instance.",
        );
        let log = Area { x: LEFT.0, y: STORE_Y, width: 100, height };
        self.labelled("box", log, "Access log", "as CSV");
        let simulator = Area { x: 160, y: STORE_Y, width: 168, height };
        self.labelled("own", simulator, "Simulator", "replays it, shows denials");
        self.arrow(&[(log.x + log.width, STORE_Y + height / 2), (simulator.x, STORE_Y + height / 2)]);
    }

    /// Draws a box with a name and a line of detail in its centre.
    fn labelled(&mut self, class: &str, area: Area, name: &str, detail: &str) {
        self.area(class, area);
        let (x, y) = (area.x + area.width / 2, area.y + area.height / 2);
        self.text("name middle", x, y - 4, name);
        self.text("middle", x, y + 15, detail);
    }

    fn area(&mut self, class: &str, area: Area) {
        let Area { x, y, width, height } = area;
        let _ = writeln!(
            self.body,
            "<rect class=\"{class}\" x=\"{x}.5\" y=\"{y}.5\" width=\"{width}\" height=\"{height}\" rx=\"6\"/>"
        );
    }

    fn text(&mut self, class: &str, x: u32, y: u32, content: &str) {
        let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
        let _ = writeln!(self.body, "<text{class} x=\"{x}\" y=\"{y}\">{content}</text>");
    }

    fn line(&mut self, points: &[(u32, u32)]) {
        let path: Vec<String> = points.iter().map(|(x, y)| format!("{x} {y}")).collect();
        let _ = writeln!(self.body, "<path class=\"arrow\" d=\"M{}\"/>", path.join("L"));
    }

    /// Draws a line with a head at its last point; the last segment goes right or down.
    fn arrow(&mut self, points: &[(u32, u32)]) {
        self.line(points);
        if let [.., (from_x, _), (x, y)] = points {
            let head = if from_x < x { "l-8 -4v8z" } else { "l-4 -8h8z" };
            let _ = writeln!(self.body, "<path class=\"head\" d=\"M{x} {y}{head}\"/>");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checked_in_overview_is_current() {
        const STORED: &str = include_str!("../../docs/pictures/overview.svg");
        assert!(
            overview() == STORED,
            "docs/pictures/overview.svg is out of date; `cargo xtask pictures` writes it again"
        );
    }
}
