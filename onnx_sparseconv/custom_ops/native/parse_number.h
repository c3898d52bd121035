// Numbers in session config entries.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <system_error>

namespace sparseconv {

// A decimal number from `least` to `most`; nothing where the text is none.
inline std::optional<int64_t> ParseNumber(const std::string& text, int64_t least, int64_t most) {
  int64_t number = 0;
  const char* const text_end = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), text_end, number);
  if (error != std::errc() || end != text_end || number < least || number > most) return std::nullopt;
  return number;
}

}  // namespace sparseconv
