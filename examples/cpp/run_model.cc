// Runs a converted model from C++, with nothing but ONNX Runtime's C API and the custom-op library.
//
//   run_model MODEL LIBRARY INPUT SHAPE OUTPUT
//   run_model model.sparse.onnx ./libonnx_sparseconv.so input.bin 1,3,224,224 output.bin
//
// INPUT holds the model's first input as raw float32, OUTPUT receives its first output in the same form. Only the line
// marked (*) differs from a program that runs any other model.

#include <onnxruntime_c_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace {

// The releases from 1.20 on, which the library needs, all have this version of the API.
const OrtApi* const ort = OrtGetApiBase()->GetApi(20);

void Check(OrtStatus* status) {
  if (status == nullptr) return;
  std::fprintf(stderr, "run_model: %s\n", ort->GetErrorMessage(status));
  ort->ReleaseStatus(status);
  std::exit(1);
}

void Require(bool condition, const char* message) {
  if (condition) return;
  std::fprintf(stderr, "run_model: %s\n", message);
  std::exit(1);
}

std::vector<float> ReadFloats(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  Require(file.good(), "cannot read the input file");
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  std::vector<float> values(bytes.size() / sizeof(float));
  std::copy_n(bytes.data(), values.size() * sizeof(float), reinterpret_cast<char*>(values.data()));
  return values;
}

std::vector<int64_t> ParseShape(const std::string& text) {
  std::vector<int64_t> shape;
  std::istringstream stream(text);
  for (std::string size; std::getline(stream, size, ',');) shape.push_back(std::stoll(size));
  return shape;
}

}  // namespace

int main(int argc, char** argv) {
  Require(argc == 6, "usage: run_model MODEL LIBRARY INPUT SHAPE OUTPUT");
  Require(ort != nullptr, "needs ONNX Runtime 1.20 or later");
  const char* const model = argv[1];
  const char* const library = argv[2];
  std::vector<float> input = ReadFloats(argv[3]);
  const std::vector<int64_t> shape = ParseShape(argv[4]);

  OrtEnv* env = nullptr;
  Check(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "run_model", &env));
  OrtSessionOptions* options = nullptr;
  Check(ort->CreateSessionOptions(&options));
  Check(ort->RegisterCustomOpsLibrary_V2(options, library));  // (*)
  OrtSession* session = nullptr;
  Check(ort->CreateSession(env, model, options, &session));

  OrtAllocator* allocator = nullptr;  // the default one; it is not released
  Check(ort->GetAllocatorWithDefaultOptions(&allocator));
  char *input_name = nullptr, *output_name = nullptr;
  Check(ort->SessionGetInputName(session, 0, allocator, &input_name));
  Check(ort->SessionGetOutputName(session, 0, allocator, &output_name));

  OrtMemoryInfo* cpu = nullptr;
  Check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &cpu));
  OrtValue *x = nullptr, *y = nullptr;
  Check(ort->CreateTensorWithDataAsOrtValue(cpu, input.data(), input.size() * sizeof(float), shape.data(), shape.size(),
                                            ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &x));
  Check(ort->Run(session, nullptr, &input_name, &x, 1, &output_name, 1, &y));

  OrtTensorTypeAndShapeInfo* info = nullptr;
  Check(ort->GetTensorTypeAndShape(y, &info));
  ONNXTensorElementDataType type;
  Check(ort->GetTensorElementType(info, &type));
  Require(type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, "the model's first output is not float");
  size_t count = 0;
  Check(ort->GetTensorShapeElementCount(info, &count));
  void* data = nullptr;
  Check(ort->GetTensorMutableData(y, &data));
  const float* values = static_cast<const float*>(data);

  std::printf("%s: %zu values:", output_name, count);
  for (size_t i = 0; i < count && i < 8; ++i) std::printf(" %g", values[i]);
  std::printf(count > 8 ? " ...\n" : "\n");
  std::ofstream output(argv[5], std::ios::binary);
  output.write(reinterpret_cast<const char*>(values), static_cast<std::streamsize>(count * sizeof(float)));
  output.close();
  Require(output.good(), "cannot write the output file");

  ort->ReleaseTensorTypeAndShapeInfo(info);
  ort->ReleaseValue(y);
  ort->ReleaseValue(x);
  ort->ReleaseMemoryInfo(cpu);
  Check(ort->AllocatorFree(allocator, input_name));
  Check(ort->AllocatorFree(allocator, output_name));
  ort->ReleaseSession(session);
  ort->ReleaseSessionOptions(options);
  ort->ReleaseEnv(env);
  return 0;
}
