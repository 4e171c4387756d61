#include "examples/train.h"

int main(int argc, char** argv) { return offload::examples::TrainMain(argc, argv); }
