"""Hundreds of items, good and bad, leave memory and open files as they were."""

import gc
import os

import psutil
import pytest
from omni_processor import MediaError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_memory_and_descriptors_stay_flat_over_hundreds_of_videos(
    make_omni, make_frames, make_wave, write_video, write_sound, tmp_path
):
    omni = make_omni(cache_bytes=1_000_000)
    process = psutil.Process()

    def go(first, count):
        for number in range(first, first + count):
            sound = make_wave(1.0, seed=number)
            film = write_video(make_frames(8, seed=number), 8, container="matroska", sound=sound)
            path = tmp_path / "film.mkv"
            path.write_bytes(film)
            omni("<video><audio>", videos=[path], audios=[write_sound(sound)], use_audio_in_video=True)
            for bad in (film[: len(film) // 2], film[:100], film[::-1]):
                with pytest.raises(MediaError):
                    omni("<video>", videos=[bad + bytes([number % 256])], use_audio_in_video=True)
        gc.collect()
        return process.memory_info().rss, len(os.listdir("/proc/self/fd"))

    go(0, 100)
    rss, descriptors = go(100, 50)
    later, left = go(150, 350)
    assert left <= descriptors
    assert later - rss < 24 * 2**20, f"{(later - rss) / 2**20:.1f} MiB more after 350 videos"
