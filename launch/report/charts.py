"""Draws curves as inline SVG, which the page's script makes interactive.

A chart is drawn in the units of its own viewBox. `Chart.data` tells the script where
the points are, so that pointing at a step in one chart reads all charts of a phase.
"""

import dataclasses
import math
from collections.abc import Sequence
from html import escape
from typing import Any

MAX_POINTS = 500  # a longer curve is thinned: neighbours are averaged
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 8, 20

Point = tuple[float, float | None]  # (step, value); None where it was not finite


@dataclasses.dataclass(frozen=True)
class Series:
  """Holds one curve.

  Attributes:
    name: name of the metric.
    points: (step, value) pairs; the value is None where it was not finite.
    kind: 'line', or 'dots' for few measurements joined by a thin line.
  """

  name: str
  points: Sequence[Point]
  kind: str = 'line'


@dataclasses.dataclass(frozen=True)
class Chart:
  """Holds a drawn chart.

  Attributes:
    svg: the drawing.
    data: the points and axes, for the page's script.
    last: the last value of the first curve, as text.
  """

  svg: str
  data: dict[str, Any]
  last: str


def draw_chart(
  series: Sequence[Series], *, width: int = 340, height: int = 150
) -> Chart:
  """Draws curves over a common step axis, the first one in the accent colour.

  Args:
    series: the curves.
    width: width in units of the viewBox.
    height: height in the same units.

  Returns:
    The drawing and its data.
  """
  thinned_series = [
    dataclasses.replace(s, points=thin_points(s.points)) for s in series
  ]
  xs = [x for s in thinned_series for x, _ in s.points]
  ys = [y for s in thinned_series for _, y in s.points if y is not None]
  x_low, x_high = (min(xs), max(xs)) if xs else (0.0, 1.0)
  x_high = x_high if x_high > x_low else x_low + 1
  ticks = nice_ticks(*value_range(ys), count=max(2, height // 50))
  box = (LEFT, TOP, width - LEFT - RIGHT, height - TOP - BOTTOM)
  to_pixels = _PixelMap(box, (x_low, x_high), (ticks[0], ticks[-1]))
  body = [_axes(to_pixels, ticks, width)]
  for number, curve in enumerate(thinned_series):
    body.append(_curve(to_pixels, curve, number))
  body.append(f'<line class="cross" y1="{TOP}" y2="{TOP + box[3]}" x1="-9" x2="-9"/>')
  label = escape(', '.join(s.name for s in series))
  svg = (
    f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    f'{"".join(body)}</svg>'
  )
  data = {
    'box': box,
    'x': (x_low, x_high),
    'y': (ticks[0], ticks[-1]),
    'series': [
      {'name': s.name, 'points': [(_short(x), _short(y)) for x, y in s.points]}
      for s in thinned_series
    ],
  }
  last = (
    next((y for _, y in reversed(thinned_series[0].points)), None)
    if thinned_series
    else None
  )
  return Chart(svg, data, format_number(last))


@dataclasses.dataclass(frozen=True)
class _PixelMap:
  """Maps steps and values to coordinates in the drawing."""

  box: tuple[int, int, int, int]
  x: tuple[float, float]
  y: tuple[float, float]

  def __call__(self, x: float, y: float) -> tuple[float, float]:
    left, top, width, height = self.box
    across = (x - self.x[0]) / (self.x[1] - self.x[0])
    up = (y - self.y[0]) / (self.y[1] - self.y[0])
    return round(left + across * width, 1), round(top + (1 - up) * height, 1)


def _axes(place: _PixelMap, ticks: Sequence[float], width: int) -> str:
  parts = []
  for tick in ticks:
    _, y = place(place.x[0], tick)
    base = ' base' if tick == ticks[0] else ''
    parts.append(f'<line class="grid{base}" x1="{LEFT}" x2="{width - RIGHT}" ')
    parts.append(f'y1="{y}" y2="{y}"/>')
    parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3}" ')
    parts.append(f'text-anchor="end">{format_tick(tick, ticks[1] - ticks[0])}</text>')
  low, high = place.x
  inner = [t for t in nice_ticks(low, high, count=4) if low <= t <= high]
  bottom = place.box[1] + place.box[3] + 14
  for tick in inner:
    if tick != int(tick):
      continue
    x, _ = place(tick, ticks[0])
    parts.append(f'<text class="tick" x="{x}" y="{bottom}" ')
    parts.append(f'text-anchor="middle">{format_number(tick)}</text>')
  return ''.join(parts)


def _curve(place: _PixelMap, series: Series, number: int) -> str:
  points = list(series.points)
  tone = f'c{number % 4}'
  if series.kind == 'dots' or len(points) == 1:
    dots = [place(x, y) for x, y in points if y is not None]
    circles = ''.join(f'<circle cx="{x}" cy="{y}" r="3.2"/>' for x, y in dots)
    joined = f'<path class="faint" d="{_path(place, points)}"/>'
    return f'<g class="dots {tone}">{joined}{circles}</g>'
  smooth = smooth_points(points)
  if smooth is None:
    curve = f'<path class="line" d="{_path(place, points)}"/>'
  else:
    curve = f'<path class="faint" d="{_path(place, points)}"/>'
    curve += f'<path class="line" d="{_path(place, smooth)}"/>'
  missing = [place(x, place.y[0])[0] for x, y in points if y is None][:50]
  marks = ''.join(
    f'<path class="lost" d="M{x - 3} {place.box[1] + place.box[3]}h6l-3-6z"/>'
    for x in missing
  )
  return f'<g class="{tone}">{curve}{marks}</g>'


def _path(place: _PixelMap, points: Sequence[Point]) -> str:
  """Returns an SVG path; a missing value leaves a gap."""
  parts, pen = [], 'M'
  for x, y in points:
    if y is None:
      pen = 'M'
      continue
    px, py = place(x, y)
    parts.append(f'{pen}{px:g} {py:g}')
    pen = 'L'
  return ''.join(parts)


def smooth_points(points: Sequence[Point]) -> list[Point] | None:
  """Averages each point over a twentieth of the curve; None for a short curve."""
  reach = len(points) // 40
  if reach < 1:
    return None
  result: list[Point] = []
  for i, (x, y) in enumerate(points):
    near = [v for _, v in points[max(0, i - reach) : i + reach + 1] if v is not None]
    result.append((x, sum(near) / len(near) if y is not None else None))
  return result


def thin_points(points: Sequence[Point]) -> list[Point]:
  """Averages neighbours so that at most MAX_POINTS remain; both ends are kept."""
  if len(points) <= MAX_POINTS:
    return list(points)
  first, *middle, last = points
  size = math.ceil(len(middle) / (MAX_POINTS - 2))
  result = [first]
  for i in range(0, len(middle), size):
    part = middle[i : i + size]
    values = [y for _, y in part if y is not None]
    result.append(
      (part[len(part) // 2][0], sum(values) / len(values) if values else None)
    )
  return [*result, last]


def value_range(values: Sequence[float]) -> tuple[float, float]:
  """Returns the range to show: from 0 if the values lie near it, and never empty."""
  if not values:
    return 0.0, 1.0
  low, high = min(values), max(values)
  if low >= 0 and low <= 0.6 * high:
    low = 0.0
  blur = 1e-5 * max(abs(low), abs(high))  # less is rounding, not a change
  if low != high and high - low < blur:
    low, high = low - blur, high + blur
  if low == high:
    pad = abs(low) * 0.1 or 1.0
    low, high = (0.0, high) if low > 0 and pad == 1.0 else (low - pad, high + pad)
  return low, high


def nice_ticks(low: float, high: float, count: int = 3) -> list[float]:
  """Returns about `count` round numbers that cover the range from `low` to `high`."""
  rough = (high - low) / max(count, 1)
  power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
  step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
  first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
  return [float(f'{i * step:.12g}') for i in range(first, max(last, first + 1) + 1)]


def format_tick(value: float, step: float) -> str:
  """Formats a tick with as many decimals as distinguish it from its neighbours."""
  if not 1e-3 <= max(abs(value), step) < 1e4:
    return format_number(value)
  digits = max(0, -math.floor(math.log10(step) + 1e-9))
  text = f'{value:.{digits}f}'
  return text if math.isclose(float(text), value, abs_tol=step / 100) else f'{value:g}'


def format_number(value: float | None) -> str:
  """Formats a number in few characters: 0.312, 12.5k, 3e-6."""
  if value is None:
    return '–'
  size = abs(value)
  if value == 0:
    return '0'
  if size >= 1e4:
    for unit, name in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
      if size >= unit:
        return f'{value / unit:.3g}{name}'
  if size < 1e-3:
    mantissa, power = f'{value:.2e}'.split('e')
    return f'{mantissa.rstrip("0").rstrip(".")}e{int(power)}'
  return f'{value:.4g}' if size >= 100 else f'{value:.3g}'


def _short(value: float | None) -> float | None:
  return None if value is None else float(f'{value:.6g}')
