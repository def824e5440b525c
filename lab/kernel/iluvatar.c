// A kernel module under the name of Iluvatar's that shows the device nodes of four cards and does nothing.
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>

#define CARDS 4

static const struct file_operations operations = {.owner = THIS_MODULE};
static const char *const names[CARDS] = {"iluvatar0", "iluvatar1", "iluvatar2", "iluvatar3"};
static struct miscdevice nodes[CARDS];

static int __init begin(void)
{
	int number, failed;

	for (number = 0; number < CARDS; number++) {
		nodes[number].minor = MISC_DYNAMIC_MINOR;
		nodes[number].name = names[number];
		nodes[number].fops = &operations;
		nodes[number].mode = 0666;
		failed = misc_register(&nodes[number]);
		if (failed) {
			while (number--)
				misc_deregister(&nodes[number]);
			return failed;
		}
	}
	return 0;
}

static void __exit end(void)
{
	int number;

	for (number = 0; number < CARDS; number++)
		misc_deregister(&nodes[number]);
}

module_init(begin);
module_exit(end);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Stands in for Iluvatar's kernel module");
MODULE_VERSION("4.3.000");
