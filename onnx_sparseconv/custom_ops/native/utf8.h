// Names of a model may be any bytes; messages and JSON have to be valid UTF-8.
#pragma once

#include <cstddef>
#include <string>

namespace sparseconv {

// Bytes of the character that begins at `at`, 1 to 4; 0 where none does.
inline size_t Utf8CharacterSize(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned first = byte(at), second = byte(at + 1);
  if (first < 0x80) return 1;
  const size_t size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  // Neither longer than need be, nor a surrogate, nor beyond U+10FFFF.
  const unsigned low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (first < 0xC2 || first > 0xF4 || second < low || second > high) return 0;
  for (size_t i = 2; i < size; ++i) {
    if (byte(at + i) < 0x80 || byte(at + i) > 0xBF) return 0;
  }
  return size;
}

// The text with '?' for each byte that belongs to no character.
inline std::string AsUtf8(const std::string& text) {
  std::string valid;
  for (size_t at = 0; at < text.size();) {
    const size_t size = Utf8CharacterSize(text, at);
    valid += size > 0 ? text.substr(at, size) : "?";
    at += size > 0 ? size : 1;
  }
  return valid;
}

}  // namespace sparseconv
