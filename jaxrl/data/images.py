"""Images that models see: one canonical form, named by a digest of its contents.

What comes from an environment, a data file or a request is decoded here, within limits.
Nothing is fetched: neither URLs nor paths are followed.
"""

import base64
import binascii
import dataclasses
import functools
import hashlib
import io
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # pages that show images need no JAX
  from jaxrl.types import Message

MAX_BYTES = 20 << 20  # of an encoded image
MAX_PIXELS = 1 << 24  # 4096 × 4096
FORMATS = ('PNG', 'JPEG')
MARK = 'sha256:'  # before a digest that stands for an image in JSON
_DIGEST = re.compile('[0-9a-f]{64}')


@dataclasses.dataclass(frozen=True, repr=False)
class Image:
  """An RGB image.

  Attributes:
    png: The image as a PNG file. Two images with equal pixels that `as_image` made have
      equal bytes.
    width: Pixels of a row.
    height: Pixels of a column.
  """

  png: bytes
  width: int
  height: int

  def __repr__(self) -> str:
    return f'Image({self.width}×{self.height}, {self.digest})'

  @functools.cached_property
  def digest(self) -> str:
    """Returns the SHA-256 of `png` in hexadecimal, which identifies the image."""
    return hashlib.sha256(self.png).hexdigest()

  @property
  def mark(self) -> str:
    """Returns the string that stands for the image in JSON."""
    return MARK + self.digest

  def array(self) -> np.ndarray:
    """Returns the pixels, uint8 `[H, W, 3]`."""
    with _open(self.png) as image:
      return np.array(image.convert('RGB'))

  def data_url(self) -> str:
    """Returns the image as a `data:` URL."""
    return f'data:image/png;base64,{base64.b64encode(self.png).decode()}'


def as_image(value: Any) -> Image:
  """Converts a value to an image.

  Args:
    value: An `Image`; a PIL image; an array `[H, W]`, `[H, W, 1]`, `[H, W, 3]` or `[H,
      W, 4]` of uint8, or of floats from 0 to 1; the bytes of a PNG or JPEG file; a
      `data:` URL; or a mapping that holds one of these as `bytes` or `url`. What is
      transparent becomes white.

  Returns:
    The image.

  Raises:
    ValueError: If it is none of these, is broken, or is too large.
  """
  if isinstance(value, Image):
    return value
  if isinstance(value, Mapping):
    inner = value.get('bytes') if value.get('bytes') is not None else value.get('url')
    if inner is None or isinstance(inner, Mapping):
      raise ValueError(f'an image needs bytes or url; it has {", ".join(value)[:80]}')
    return as_image(inner)
  if isinstance(value, str):
    return from_bytes(_data_url_bytes(value))
  if isinstance(value, bytes | bytearray | memoryview):
    return from_bytes(bytes(value))
  if isinstance(value, np.ndarray):
    return _encode(_from_array(value))
  if hasattr(value, 'convert') and hasattr(value, 'size'):  # PIL's, without its import
    _check_size(*value.size)
    try:
      return _encode(value)
    except (OSError, SyntaxError) as error:
      raise ValueError(f'a broken image: {error}') from error
  raise ValueError(
    f'{type(value).__name__} is not a type of images: give a PIL image, an array of '
    'pixels, the bytes of a PNG or JPEG file, or a data: URL'
  )


def from_bytes(data: bytes) -> Image:
  """Decodes a PNG or JPEG file.

  Args:
    data: The file's bytes.

  Returns:
    The image.

  Raises:
    ValueError: If the file is broken or too large.
  """
  with _open(data) as image:
    return _encode(image)


def from_png(data: bytes) -> Image:
  """Takes the bytes of an `Image` as they are, so that its digest stays the same.

  Args:
    data: What `Image.png` was.

  Returns:
    The image.

  Raises:
    ValueError: If they are broken, too large, or no PNG file in RGB.
  """
  with _open(data) as image:
    if (image.format, image.mode) != ('PNG', 'RGB'):
      raise ValueError(f'a {image.format} file of {image.mode} is no PNG file of RGB')
    return Image(data, *image.size)


class ImageFolder(Mapping[str, Image]):
  """The images that are kept in a folder, as `DIGEST.png`, by what stands for them.

  Args:
    folder: The folder, such as `images` beside a dump.
  """

  def __init__(self, folder: str | pathlib.Path):
    self._folder = pathlib.Path(folder)

  def __getitem__(self, mark: str) -> Image:
    digest = mark.removeprefix(MARK)
    if not _DIGEST.fullmatch(digest):  # so that no mark leads out of the folder
      raise KeyError(mark)
    try:
      image = from_png((self._folder / f'{digest}.png').read_bytes())
    except OSError as error:
      raise KeyError(mark) from error
    if image.digest != digest:
      raise ValueError(f'the contents of {mark} are not those of its name')
    return image

  def __iter__(self) -> Iterator[str]:
    return (MARK + path.stem for path in sorted(self._folder.glob('*.png')))

  def __len__(self) -> int:
    return sum(1 for _ in self)


def with_images(messages: 'Iterable[Message]') -> 'list[Message]':
  """Returns messages with all of their images as `Image`s.

  Args:
    messages: Messages, with parts such as `{'type': 'image', 'image': …}`, whose image
      is anything that `as_image` takes.

  Returns:
    The messages.

  Raises:
    ValueError: If something is not an image, is broken, or is too large.
  """
  return map_images(messages, as_image)


def map_images(
  messages: 'Iterable[Message]', fn: Callable[[Any], Any]
) -> 'list[Message]':
  """Returns messages with a function applied to each of their images.

  Args:
    messages: The messages.
    fn: Takes what stands in the place of an image, and returns what is to.
  """

  def part(value: Any) -> Any:
    is_image = isinstance(value, Mapping) and value.get('type') == 'image'
    return {**value, 'image': fn(value.get('image'))} if is_image else value

  return [
    {**message, 'content': [part(x) for x in message['content']]}
    if isinstance(message.get('content'), list)
    else message
    for message in messages
  ]


def find_images(messages: 'Iterable[Message]') -> Iterator[Image]:
  """Yields the images of messages, in order.

  Args:
    messages: Messages, whose images are `Image`s.
  """
  for message in messages:
    content = message.get('content')
    for part in content if isinstance(content, list | tuple) else ():
      if isinstance(part, Mapping) and isinstance(part.get('image'), Image):
        yield part['image']


def _open(data: bytes) -> Any:
  """Decodes a file within limits; returns a PIL image. Raises ValueError."""
  from PIL import Image as pil  # text alone needs none

  if len(data) > MAX_BYTES:
    raise ValueError(
      f'an image of {len(data):,} bytes is too large: the limit is {MAX_BYTES:,}'
    )
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # of a size that is checked below
      image = pil.open(io.BytesIO(data), formats=FORMATS)
      _check_size(*image.size)  # before any pixel is decoded
      image.load()
  except pil.DecompressionBombError as error:
    raise ValueError(f'an image is too large: {error}') from error
  except (OSError, SyntaxError, EOFError, pil.UnidentifiedImageError) as error:
    text = str(error).splitlines()[0].partition(' <_io')[0]
    raise ValueError(f'a broken image, or neither PNG nor JPEG: {text}') from error
  return image


def _check_size(width: int, height: int) -> None:
  if not 0 < width * height <= MAX_PIXELS:
    raise ValueError(
      f'an image of {width} × {height} pixels: there may be 1 to {MAX_PIXELS:,}'
    )


def _encode(image: Any) -> Image:
  """Encodes a PIL image in the canonical form."""
  from PIL import Image as pil

  if image.mode in ('RGBA', 'LA', 'PA') or 'transparency' in image.info:
    image = image.convert('RGBA')
    white = pil.new('RGBA', image.size, 'white')
    image = pil.alpha_composite(white, image)
  plain = pil.fromarray(np.array(image.convert('RGB')))  # without what a file may add
  file = io.BytesIO()
  plain.save(file, 'PNG')
  return Image(file.getvalue(), *plain.size)


def _from_array(array: np.ndarray) -> Any:
  """Converts an array of pixels to a PIL image. Raises ValueError."""
  from PIL import Image as pil

  shape = array.shape
  if array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in (1, 3, 4)):
    raise ValueError(
      f'an array of shape {list(shape)} is not an image: it must be [H, W], or '
      '[H, W, C] with 1, 3 or 4 channels'
    )
  _check_size(shape[1], shape[0])
  if array.dtype.kind == 'f':
    if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
      raise ValueError('an image of floats has pixels outside 0 … 1')
    array = np.round(array * 255).astype(np.uint8)
  if array.dtype != np.uint8:
    raise ValueError(
      f'an image has pixels of {array.dtype}; they must be uint8 or float'
    )
  if array.ndim == 3 and shape[2] == 1:
    array = array[:, :, 0]
  return pil.fromarray(np.ascontiguousarray(array))


def _data_url_bytes(text: str) -> bytes:
  """Returns the bytes of a base64 `data:` URL of an image. Raises ValueError."""
  head, comma, body = text[:100].partition(',')
  if not text.startswith('data:'):
    raise ValueError(
      f'{text[:60]!r} is not a data: URL, and nothing is fetched: send the image '
      'itself, as data:image/png;base64,…'
    )
  if not comma or not head.endswith(';base64'):
    raise ValueError('a data: URL of an image must be data:image/png;base64,…')
  body = text[len(head) + 1 :]
  if len(body) > MAX_BYTES * 4 // 3 + 4:
    raise ValueError(
      f'an image of about {len(body) * 3 // 4:,} bytes is too large: the limit is '
      f'{MAX_BYTES:,}'
    )
  try:
    return base64.b64decode(body, validate=True)
  except (binascii.Error, ValueError) as error:
    raise ValueError(f'a data: URL of an image is not base64: {error}') from error
