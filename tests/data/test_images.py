"""Images from anywhere have one form and one name; broken and huge ones are refused."""

import base64
import io
import pickle
import struct
import zlib

import numpy as np
import PIL.Image
import pytest

from jaxrl.data import images
from jaxrl.data.images import as_image, from_png

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


def file_of(pixels, kind='PNG', **options):
  file = io.BytesIO()
  PIL.Image.fromarray(pixels).save(file, kind, **options)
  return file.getvalue()


def url_of(data):
  return f'data:image/png;base64,{base64.b64encode(data).decode()}'


def png_of_size(width, height):
  """A PNG file that claims a size, and holds no pixels."""

  def chunk(name, data):
    check = zlib.crc32(name + data)
    return struct.pack('>I', len(data)) + name + data + struct.pack('>I', check)

  header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
  return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IEND', b'')


def test_equal_pixels_are_one_image_wherever_they_come_from():
  wanted = as_image(PIXELS)
  assert (wanted.width, wanted.height) == (7, 5)
  np.testing.assert_array_equal(wanted.array(), PIXELS)
  slow = file_of(PIXELS, compress_level=1, pnginfo=None)
  for value in (
    wanted,
    PIL.Image.fromarray(PIXELS),
    PIXELS / 255,
    slow,
    bytearray(slow),
    url_of(slow),
    {'url': url_of(slow)},
    {'bytes': slow, 'path': None},
    pickle.loads(pickle.dumps(wanted)),
    from_png(wanted.png),
  ):
    assert as_image(value) == wanted and as_image(value).digest == wanted.digest
  assert as_image(255 - PIXELS).digest != wanted.digest
  assert len(repr(wanted)) < 100  # without its bytes


def test_grey_and_transparent_pixels_become_rgb():
  grey = as_image(PIXELS[:, :, 0])
  np.testing.assert_array_equal(grey.array(), PIXELS[:, :, :1].repeat(3, axis=2))
  assert as_image(PIXELS[:, :, :1]) == grey
  clear = np.concatenate([PIXELS, np.zeros((5, 7, 1), np.uint8)], axis=2)
  assert (as_image(clear).array() == 255).all()
  jpeg = as_image(file_of(PIXELS, 'JPEG'))
  assert (jpeg.width, jpeg.height) == (7, 5) and jpeg.png.startswith(b'\x89PNG')


@pytest.mark.parametrize(
  'value, words',
  [
    (b'not an image', 'broken image, or neither PNG nor JPEG'),
    (file_of(PIXELS)[:60], 'broken image'),
    (file_of(PIXELS, 'GIF'), 'neither PNG nor JPEG'),
    (png_of_size(60000, 60000), 'too large'),
    (png_of_size(5000, 5000), '5000 × 5000 pixels: there may be'),
    (b'x' * (images.MAX_BYTES + 1), 'bytes is too large'),
    (url_of(b'x' * (images.MAX_BYTES + 3)), 'bytes is too large'),
    ('https://example.org/a.png', 'nothing is fetched'),
    ('/etc/passwd', 'nothing is fetched'),
    ('data:image/png,abc', 'must be data:image/png;base64'),
    ('data:image/png;base64,!!', 'not base64'),
    ({'path': '/etc/passwd'}, 'needs bytes or url'),
    (np.zeros((2, 3, 5), np.uint8), r'shape \[2, 3, 5\]'),
    (np.zeros((0, 3), np.uint8), '3 × 0 pixels'),
    (np.full((2, 2), 1.5), 'outside 0 … 1'),
    (np.zeros((2, 2), np.int32), 'pixels of int32'),
    (7, 'int is not a type of images'),
  ],
)
def test_what_is_no_image_is_refused_in_one_line(value, words):
  with pytest.raises(ValueError, match=words) as error:
    as_image(value)
  assert '\n' not in str(error.value) and len(str(error.value)) < 250


def test_an_image_that_is_read_again_must_be_a_png_of_rgb():
  with pytest.raises(ValueError, match='JPEG file of RGB'):
    from_png(file_of(PIXELS, 'JPEG'))
  with pytest.raises(ValueError, match='PNG file of L'):
    from_png(file_of(PIXELS[:, :, 0]))
