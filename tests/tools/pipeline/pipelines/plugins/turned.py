from plugins import STEPS


def turned(image):
    return image.transpose(2)


STEPS.append(turned)
