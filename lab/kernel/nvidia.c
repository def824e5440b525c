// A kernel module under the name of NVIDIA's that does nothing: it is loaded and has a version. For tests of what is
// loaded, installed and found by the next boot. Tests change the version's digits in the built file.
#include <linux/module.h>

static int __init begin(void) { return 0; }
static void __exit end(void) {}

module_init(begin);
module_exit(end);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Stands in for NVIDIA's kernel module");
MODULE_VERSION("550.000.01");
